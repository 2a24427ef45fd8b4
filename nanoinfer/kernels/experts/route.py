"""Routing: each token's router logits choose its experts and their weights (Shazeer et al., 2017)."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import early_launch, wait_for_predecessor

Scoring = Literal["softmax", "sigmoid"]

FEW, MANY = 1024, 16384  # choices that a program reads at a time: of a decode step, or of a long prompt


class Routes(NamedTuple):
    """The experts that tokens use, the likeliest first.

    experts: [tokens, used] int32
    weights: [tokens, used] float32, the factor of each expert's result
    """

    experts: Tensor
    weights: Tensor


class Groups(NamedTuple):
    """The choices of all tokens, sorted by their expert; choice t * used + i is the i-th expert of token t.

    choices: [tokens * used] int32; those of one expert stand in the order of their tokens
    tiles: [most_tiles(...), 3] int32: a tile's expert, where in `choices` the tile begins, and where the expert's
        choices end; a tile that this routing does not need begins there or after
    """

    choices: Tensor
    tiles: Tensor


def route(logits: Tensor, used: int, scoring: Scoring = "softmax", normalised: bool = False) -> Routes:
    """Choose each token's experts: those of its `used` largest scores. Among equals the first experts win.

    If a token's logits are NaN, its weights are NaN, and its experts are any.
    logits: [tokens, experts]
    scoring: the function that turns logits into scores: softmax over the experts, or the sigmoid of each
    normalised: a token's weights are its chosen scores divided by their sum; else the scores themselves
    """
    return (route_triton if logits.is_cuda else route_reference)(logits, used, scoring, normalised)


def route_reference(logits: Tensor, used: int, scoring: Scoring = "softmax", normalised: bool = False) -> Routes:
    """route in torch."""
    wide = logits.float()
    scores = wide.softmax(dim=-1) if scoring == "softmax" else wide.sigmoid()
    values, experts = scores.sort(dim=-1, descending=True, stable=True)
    weights = values[:, :used]
    if normalised:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return Routes(experts[:, :used].int(), weights)


def route_triton(logits: Tensor, used: int, scoring: Scoring = "softmax", normalised: bool = False) -> Routes:
    """route as one launch."""
    tokens, count = logits.shape
    experts = torch.empty((tokens, used), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, used), dtype=torch.float32, device=logits.device)
    _route_kernel[(tokens,)](
        logits,
        experts,
        weights,
        count,
        logits.stride(0),
        USED=used,
        SOFTMAX=scoring == "softmax",
        NORMALISED=normalised,
        BLOCK=triton.next_power_of_2(count),
        BLOCK_USED=triton.next_power_of_2(used),
        num_warps=1,
        **early_launch(logits),
    )
    return Routes(experts, weights)


@triton.jit
def _route_kernel(
    logits_ptr,
    experts_ptr,
    weights_ptr,
    count,
    stride,
    USED: tl.constexpr,
    SOFTMAX: tl.constexpr,
    NORMALISED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_USED: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY)
    token = tl.program_id(0).to(tl.int64)
    expert, rank = tl.arange(0, BLOCK), tl.arange(0, BLOCK_USED)
    exists = expert < count
    wide = tl.load(logits_ptr + token * stride + expert, mask=exists, other=float("-inf")).to(tl.float32)
    if SOFTMAX:
        exps = tl.exp(wide - tl.max(wide))
        scores = exps / tl.sum(exps)
    else:
        scores = tl.sigmoid(wide)
    order = tl.where(exists, tl.where(scores == scores, scores, 0.0), -1.0)  # NaN must not hide the experts' numbers
    experts = tl.zeros([BLOCK_USED], tl.int32)
    weights = tl.zeros([BLOCK_USED], tl.float32)
    for i in tl.static_range(USED):
        index = tl.min(tl.where(order == tl.max(order), expert, BLOCK))
        experts = tl.where(rank == i, index, experts)
        weights = tl.where(rank == i, tl.sum(tl.where(expert == index, scores, 0.0)), weights)
        order = tl.where(expert == index, -2.0, order)
    if NORMALISED:
        weights = weights / tl.sum(weights)
    tl.store(experts_ptr + token * USED + rank, experts, mask=rank < USED)
    tl.store(weights_ptr + token * USED + rank, weights, mask=rank < USED)


def most_tiles(choices: int, count: int, size: int) -> int:
    """Return how many tiles of `size` choices, each of one expert, any routing needs at most; of `count` experts."""
    return min(choices, choices // size + count)


def group_reference(experts: Tensor, count: int, size: int) -> Groups:
    """Sort all choices by their expert, and cut them into tiles.

    An expert's first tile has a number that follows from the choices before it alone; so some numbers stay unused.
    experts: [tokens, used] int32, each below count; no token chooses an expert twice
    size: choices in a tile, at most
    """
    flat = experts.flatten()
    starts = F.pad(flat.bincount(minlength=count).cumsum(0), (1, 0))
    number = torch.arange(most_tiles(len(flat), count, size), device=flat.device)
    firsts = starts if len(number) == len(flat) else starts // size + torch.arange(count + 1, device=flat.device)
    expert = torch.searchsorted(firsts, number, right=True) - 1
    tiles = torch.stack([expert, starts[expert] + (number - firsts[expert]) * size, starts[expert + 1]], dim=1)
    return Groups(flat.argsort(stable=True).int(), tiles.int())


def group_triton(experts: Tensor, count: int, size: int) -> Groups:
    """group_reference as one launch: a program for each expert reads all choices, and writes down its own."""
    tokens, used = experts.shape
    choices = torch.empty(experts.numel(), dtype=torch.int32, device=experts.device)
    tiles = torch.empty((most_tiles(experts.numel(), count, size), 3), dtype=torch.int32, device=experts.device)
    block_used = triton.next_power_of_2(used)
    block = (FEW if tokens * used <= MANY else MANY) // block_used
    _group_kernel[(count,)](
        experts,
        choices,
        tiles,
        tokens,
        count,
        SIZE=size,
        ONE_EACH=len(tiles) == len(choices),
        USED=used,
        BLOCK=block,
        BLOCK_USED=block_used,
        num_warps=min(block * block_used // 256, 16),
        **early_launch(experts),
    )
    return Groups(choices, tiles)


@triton.jit(do_not_specialize=["tokens"])
def _group_kernel(
    experts_ptr,
    choices_ptr,
    tiles_ptr,
    tokens,
    count,
    SIZE: tl.constexpr,
    ONE_EACH: tl.constexpr,
    USED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_USED: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY)
    expert = tl.program_id(0)
    lower = tl.zeros([BLOCK, BLOCK_USED], tl.int32)  # choices of experts before this one
    for first in range(0, tokens, BLOCK):
        chosen, _ = _load_choices(experts_ptr, first, tokens, count, USED, BLOCK, BLOCK_USED)
        lower += (chosen < expert).to(tl.int32)
    start = tl.sum(lower)
    end = start
    for first in range(0, tokens, BLOCK):
        chosen, choice = _load_choices(experts_ptr, first, tokens, count, USED, BLOCK, BLOCK_USED)
        is_own = chosen == expert
        own = tl.sum(is_own.to(tl.int32), axis=1)  # at most 1
        place = end + tl.cumsum(own, 0) - own
        tl.store(choices_ptr + tl.broadcast_to(place[:, None], [BLOCK, BLOCK_USED]), choice, mask=is_own)
        end += tl.sum(own)

    first_tile = start if ONE_EACH else start // SIZE + expert
    next_tile = end if ONE_EACH else end // SIZE + expert + 1  # the next expert's first
    for tile in range(first_tile, next_tile):
        tl.store(tiles_ptr + tile * 3, expert)
        tl.store(tiles_ptr + tile * 3 + 1, start + (tile - first_tile) * SIZE)
        tl.store(tiles_ptr + tile * 3 + 2, end)


@triton.jit
def _load_choices(experts_ptr, first, tokens, count, USED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_USED: tl.constexpr):
    """Load the experts of BLOCK tokens; returns also the numbers of the choices. Where no choice is, stands `count`."""
    token, i = first + tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK_USED)[None, :]
    choice = token * USED + i
    return tl.load(experts_ptr + choice, mask=(token < tokens) & (i < USED), other=count), choice
