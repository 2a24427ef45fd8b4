"""Pairs: the matrices of adapters beside one weight, and which adapter each row of a step names."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import load_complete
from nanoinfer.kernels.sorting import Groups, group_reference, group_triton

FEW_ROWS = 512  # up to here narrow tiles, which keep more multiprocessors busy (not measured)
BLANKS = 1 << 14  # that one launch writes: enough for a step of most models


@dataclass(frozen=True)
class Pairs:
    """The pairs of matrices beside one weight. A slot has one for each part, such as queries, keys and values.

    The adapter of a slot adds b[slot, o] @ (a[slot] @ x)[part * rank : (part + 1) * rank] to output o, which is of
    `part`. Scales are multiplied into b; an adapter of a lower rank has zeros behind its own.

    a: [slots, parts * rank, in_features]; b: [slots, out_features, rank]; of one dtype, that of x
    parts: the outputs of each part, in the weight's order
    """

    a: Tensor
    b: Tensor
    parts: tuple[int, ...]

    @property
    def rank(self) -> int:
        """A multiple of 16."""
        return self.b.shape[2]


@dataclass(frozen=True)
class SortedRows:
    """Rows sorted by the matrices that each of them takes, for a launch that multiplies all.

    max_adapters: the number of slots
    groups: the rows by slot; those without an adapter come last, as if they had a slot more. Those of several experts
        by their expert first
    size: of the groups' tiles, in rows
    """

    max_adapters: int
    groups: Groups
    size: int


class Blanks:
    """Room for what programs of one launch tell each other, float32: negative zeros, until they do.

    A step has its own, because threads may run steps side by side.
    """

    def __init__(self, device: torch.device) -> None:
        self._left = torch.empty(0, device=device)

    def take(self, count: int) -> Tensor:
        """Return room for `count` numbers, [count]. The first call takes a launch, and so do few of the others."""
        if count > len(self._left):
            self._left = torch.full((max(count, BLANKS),), -0.0, device=self._left.device)
        taken, self._left = self._left[:count], self._left[count:]
        return taken


@dataclass(frozen=True)
class AdapterRows(SortedRows):
    """Which adapter each row of a step names, as all layers' products need it.

    At least one launch comes between those that make it and the first product's.

    slots: [rows] int32, -1 for a row without an adapter
    """

    slots: Tensor
    blanks: Blanks

    @classmethod
    def of(cls, slots: Tensor, max_adapters: int) -> AdapterRows:
        """Sort the rows, in three launches. slots: [rows] int32, from -1 to max_adapters - 1"""
        count = max_adapters + 1
        size = 16 if len(slots) <= FEW_ROWS else 64
        group = group_triton if slots.is_cuda else group_reference
        return cls(max_adapters, group((slots % count).unsqueeze(1), count, size), size, slots, Blanks(slots.device))

    def named(self) -> list[int]:
        """Return the slots that rows name, once each."""
        return [slot for slot in self.slots.unique().tolist() if slot >= 0]


@triton.jit
def load_tile(tiles_ptr, tile, tiles, slots):
    """Return the matrix of a tile of rows, or -1, and where it begins and ends: behind the last, where it begins."""
    places, exists = tiles_ptr + tile * 3, tile < tiles
    slot = load_complete(places, exists, 0)  # of `slots`, and of one more for none; then those of other experts
    matrix = tl.where(slot % (slots + 1) < slots, slot - slot // (slots + 1), -1)
    return matrix, load_complete(places + 1, exists, 0), load_complete(places + 2, exists, 0)


@triton.jit
def part_of(n, PARTS: tl.constexpr):
    """Return the part of each output n; PARTS: Pairs.parts."""
    part, end = n * 0, 0
    for i in tl.static_range(len(PARTS) - 1):
        end += PARTS[i]
        part += (n >= end).to(tl.int32)
    return part


@triton.jit
def outputs_of(block, PARTS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the part of a block of outputs, the outputs, and where the part ends. Each part has blocks of its own."""
    part, start, stop = 0, block * BLOCK_N, PARTS[0]
    before, first = 0, 0  # blocks and outputs of the parts before
    for i in tl.static_range(1, len(PARTS)):
        before += (PARTS[i - 1] + BLOCK_N - 1) // BLOCK_N
        first += PARTS[i - 1]
        part = tl.where(block >= before, i, part)
        start = tl.where(block >= before, first + (block - before) * BLOCK_N, start)
        stop = tl.where(block >= before, first + PARTS[i], stop)
    return part, start + tl.arange(0, BLOCK_N), stop
