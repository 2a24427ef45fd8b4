"""MXFP4 (Open Compute Project, 2023): numbers of four bits (e2m1); 32 of them share a scale (e8m0), a power of two.

A checkpoint has two tensors for a stack NAME of matrices, [count, in, out]. NAME_blocks, [count, out, in / 32, 16]
uint8, has two numbers in a byte, the first in the lower four bits. NAME_scales, [count, out, in / 32] uint8, has the
exponents plus 127. Such a pair is read as the stack, in bfloat16.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

BLOCKS, SCALES = "_blocks", "_scales"  # end the tensors' names
SHARING = 32  # numbers that share a scale
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the lower three bits; the fourth is the sign
BIAS = 127  # of an exponent


def is_half(name: str, dtype: str) -> bool:
    """Return whether a tensor is one of such a pair. dtype: as files name it"""
    return dtype == "U8" and name.endswith((BLOCKS, SCALES))


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers, [..., groups * 32] bfloat16, which holds them exactly if their scale allows it.

    blocks: [..., groups, 16] uint8; scales: [..., groups] uint8; all on the CPU
    """
    pairs, powers = _tables()
    numbers = pairs.index_select(0, blocks.flatten().int()).view(torch.bfloat16).view(*scales.shape, SHARING)
    return numbers.mul_(powers.index_select(0, scales.flatten().int()).view(*scales.shape, 1)).flatten(-2)


@cache
def _tables() -> tuple[Tensor, Tensor]:
    """Return the two numbers of each byte, [256] int32, and the scale that each byte stands for, [256] bfloat16."""
    halves = torch.tensor([*VALUES, *(-value for value in VALUES)], dtype=torch.bfloat16, device="cpu")
    byte = torch.arange(256, device="cpu")
    pairs = torch.stack([halves[byte % 16], halves[byte // 16]], dim=1).view(torch.int32).squeeze(1)
    ones = torch.ones(256, dtype=torch.float32, device="cpu")
    return pairs, torch.ldexp(ones, byte - BIAS).to(torch.bfloat16)  # that of 255, which stands for NaN, is infinite


class Mxfp4Stack:
    """Reads a pair as a slice object of safetensors reads the stack."""

    def __init__(self, blocks: Any, scales: Any) -> None:
        """blocks, scales: slice objects"""
        self._blocks, self._scales = blocks, scales

    def get_shape(self) -> list[int]:
        """Return the stack's shape."""
        count, rows, groups, _ = self._blocks.get_shape()
        return [count, groups * SHARING, rows]

    def get_dtype(self) -> str:
        """Return the type that files name so."""
        return "BF16"

    def __getitem__(self, index: tuple[int, slice, slice]) -> Tensor:
        entry, columns, rows = index
        first, end, _ = columns.indices(self.get_shape()[1])
        groups = slice(first // SHARING, -(-end // SHARING))
        numbers = dequantize(self._blocks[entry, rows, groups], self._scales[entry, rows, groups])
        return numbers[:, first - groups.start * SHARING : end - groups.start * SHARING].mT


class Halves:
    """The tensors of pairs, which come in any order, until the other one comes."""

    def __init__(self, what: str) -> None:
        """what: begins the messages of errors"""
        self._what = what
        self._waiting: dict[str, tuple[str, Any]] = {}

    def add(self, name: str, half: Any) -> tuple[str, Mxfp4Stack] | None:
        """Add a slice object; returns the stack and its name once both have come.

        Raises ValueError, naming them, for shapes that no pair has, and for a tensor that comes twice.
        """
        stack = name.removesuffix(BLOCKS).removesuffix(SCALES)
        if stack not in self._waiting:
            self._waiting[stack] = name, half
            return None
        other, other_half = self._waiting.pop(stack)
        if other == name:
            raise ValueError(f"{self._what}: stored twice: {name}")
        blocks, scales = (half, other_half) if name.endswith(BLOCKS) else (other_half, half)
        shapes = blocks.get_shape(), scales.get_shape()
        if len(shapes[1]) != 3 or shapes[0] != [*shapes[1], SHARING // 2]:
            raise ValueError(
                f"{self._what}: {stack}{BLOCKS} has shape {shapes[0]}, and {stack}{SCALES} {shapes[1]}: must be"
                f" [count, out, in / {SHARING}, {SHARING // 2}] and [count, out, in / {SHARING}]"
            )
        return stack, Mxfp4Stack(blocks, scales)

    def check(self) -> None:
        """Raise ValueError if some tensor has come alone."""
        for stack, (name, _) in self._waiting.items():
            other = SCALES if name.endswith(BLOCKS) else BLOCKS
            raise ValueError(f"{self._what}: has {name}, but no {stack}{other}")
