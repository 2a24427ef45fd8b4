"""Choices sorted by what is chosen, on the device: tokens by their experts, or rows by their adapters."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import launch_options, next_power_of_2, wait_for_predecessor

FEW, MANY = 2048, 16384  # choices that a program reads at a time: of a decode step, or of a long prompt


class Groups(NamedTuple):
    """The choices of all tokens, sorted by their expert; choice t * used + i is the i-th expert of token t.

    choices: [tokens * used] int32; those of one expert stand in the order of their tokens, those of none are any
    tiles: [most_tiles(...), 3] int32: a tile's expert, where in `choices` the tile begins, and where the expert's
        choices end; tiles that this routing does not need come last and begin where they end
    """

    choices: Tensor
    tiles: Tensor


def most_tiles(choices: int, count: int, size: int) -> int:
    """Return how many tiles of `size` choices, each of one expert, any routing needs at most; of `count` experts."""
    return min(choices, choices // size + count)


def group_reference(experts: Tensor, count: int, size: int) -> Groups:
    """Sort all choices by their expert, and cut them into tiles.

    experts: [tokens, used] int32; from count on they are none; no token chooses an expert twice
    size: choices in a tile, at most
    """
    flat = experts.flatten()
    counts = flat.bincount(minlength=count)[:count]
    ends, needed = counts.cumsum(0), (counts + size - 1) // size
    expert = torch.arange(count, device=flat.device).repeat_interleave(needed)
    before = torch.arange(len(expert), device=flat.device) - (needed.cumsum(0) - needed)[expert]  # of the same expert
    tiles = torch.zeros((most_tiles(len(flat), count, size), 3), dtype=torch.int32, device=flat.device)
    tiles[: len(expert)] = torch.stack([expert, (ends - counts)[expert] + before * size, ends[expert]], dim=1)
    return Groups(flat.argsort(stable=True).int(), tiles)


def group_triton(experts: Tensor, count: int, size: int) -> Groups:
    """group_reference as two launches; in both, a program for each expert reads all choices."""
    tokens, used = experts.shape
    counts = torch.empty(count, dtype=torch.int32, device=experts.device)
    choices = torch.empty(experts.numel(), dtype=torch.int32, device=experts.device)
    tiles = torch.empty((most_tiles(len(choices), count, size), 3), dtype=torch.int32, device=experts.device)
    block = FEW if len(choices) <= MANY else MANY
    block_used = next_power_of_2(used)
    shape = {"USED": used, "BLOCK": block // block_used, "BLOCK_USED": block_used}
    options = {"num_warps": min(block // 256, 16), **launch_options(experts)}
    _count_kernel[(count,)](experts, counts, tokens, count, **shape, **options)
    _group_kernel[(count,)](
        experts,
        counts,
        choices,
        tiles,
        tokens,
        count,
        len(tiles),
        SIZE=size,
        **shape,
        BLOCK_COUNT=next_power_of_2(count),
        **options,
    )
    return Groups(choices, tiles)


@triton.jit(do_not_specialize=["tokens"])
def _count_kernel(
    experts_ptr,
    counts_ptr,
    tokens,
    count,
    USED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_USED: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY)
    expert = tl.program_id(0)
    own = tl.zeros([BLOCK, BLOCK_USED], tl.int32)
    for first in range(0, tokens, BLOCK):
        chosen, _ = _load_choices(experts_ptr, first, tokens, count, USED, BLOCK, BLOCK_USED)
        own += (chosen == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(own))


@triton.jit(do_not_specialize=["tokens", "num_tiles"])
def _group_kernel(
    experts_ptr,
    counts_ptr,
    choices_ptr,
    tiles_ptr,
    tokens,
    count,
    num_tiles,
    SIZE: tl.constexpr,
    USED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_USED: tl.constexpr,
    BLOCK_COUNT: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY)
    expert, other = tl.program_id(0), tl.arange(0, BLOCK_COUNT)
    counts = tl.load(counts_ptr + other, mask=other < count, other=0)
    needed = tl.cdiv(counts, SIZE)
    start = tl.sum(tl.where(other < expert, counts, 0))
    end = start + tl.sum(tl.where(other == expert, counts, 0))
    tile = tl.sum(tl.where(other < expert, needed, 0))
    for first in range(start, end, SIZE):
        _store_tile(tiles_ptr, tile, expert, first, end)
        tile += 1
    for unneeded in range(tl.sum(needed) + expert, num_tiles, count):
        _store_tile(tiles_ptr, unneeded, 0, 0, 0)

    for first in range(0, tokens, BLOCK):
        chosen, choice = _load_choices(experts_ptr, first, tokens, count, USED, BLOCK, BLOCK_USED)
        is_own = chosen == expert
        own = tl.sum(is_own.to(tl.int32), axis=1)  # at most 1
        place = start + tl.cumsum(own, 0) - own
        tl.store(choices_ptr + tl.broadcast_to(place[:, None], [BLOCK, BLOCK_USED]), choice, mask=is_own)
        start += tl.sum(own)


@triton.jit
def _store_tile(tiles_ptr, tile, expert, first, end):
    tl.store(tiles_ptr + tile * 3, expert)
    tl.store(tiles_ptr + tile * 3 + 1, first)
    tl.store(tiles_ptr + tile * 3 + 2, end)


@triton.jit
def _load_choices(experts_ptr, first, tokens, count, USED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_USED: tl.constexpr):
    """Load the experts of BLOCK tokens; returns also the numbers of the choices. Where no choice is, stands `count`."""
    token, i = first + tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK_USED)[None, :]
    choice = token * USED + i
    return tl.load(experts_ptr + choice, mask=(token < tokens) & (i < USED), other=count), choice
