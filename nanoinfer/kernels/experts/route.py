"""Routing: each token's router logits choose its experts and their weights (Shazeer et al., 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import early_launch, wait_for_predecessor

RouterScoring = Literal["softmax", "sigmoid"]

FEW, MANY = 2048, 16384  # choices that a program reads at a time: of a decode step, or of a long prompt
LOWEST = tl.constexpr(-(2**31))


@dataclass(frozen=True)
class Routing:
    """How logits choose the experts of a token, and weigh them.

    used: experts that a token uses: those of its largest scores
    scoring: the function that turns logits into scores: softmax over the experts, or the sigmoid of each
    normalised: a token's weights are its chosen scores divided by their sum; else the scores themselves
    epsilon: is added to that sum; least_sum: the sum counts as so much if it is less
    scale: factor of the weights; logit_scale: of the logits
    groups: the experts form so many groups of neighbours, all of one size, at least two
    used_groups: a token's experts are of so many groups: those whose two largest scores have the largest sums
        (DeepSeek-V3 Technical Report, 2024)
    """

    used: int
    scoring: RouterScoring = "softmax"
    normalised: bool = False
    epsilon: float = 0.0
    least_sum: float = 0.0
    scale: float = 1.0
    logit_scale: float = 1.0
    groups: int = 1
    used_groups: int = 1


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
        choices end; tiles that this routing does not need come last and begin where they end
    """

    choices: Tensor
    tiles: Tensor


def route(logits: Tensor, routing: Routing, correction: Tensor | None = None, factors: Tensor | None = None) -> Routes:
    """Choose each token's experts, and weigh them. Among equal scores the first experts win, and the first groups.

    If a token's logits are NaN, its weights are NaN, and its experts are any.
    logits: [tokens, experts], or [pieces, tokens, experts] float32 that add up to it
    correction: [experts] float32, finite, added to the scores for the choice alone: weights come from the scores
        (Wang et al., 2024); None: nothing is added
    factors: [experts], a factor of each expert's weights, as in Gemma 4; None: the model has none
    """
    return (route_triton if logits.is_cuda else route_reference)(logits, routing, correction, factors)


def route_reference(
    logits: Tensor, routing: Routing, correction: Tensor | None = None, factors: Tensor | None = None
) -> Routes:
    """route in torch."""
    wide = (logits if logits.dim() == 2 else logits.sum(dim=0)).float() * routing.logit_scale
    scores = wide.softmax(dim=-1) if routing.scoring == "softmax" else wide.sigmoid()
    corrected = scores if correction is None else scores + correction
    if routing.groups > 1:
        corrected = corrected.masked_fill(~_in_used_groups(corrected, routing), float("-inf"))
    experts = corrected.sort(dim=-1, descending=True, stable=True).indices[:, : routing.used]
    weights = scores.gather(1, experts)
    if routing.normalised:
        weights = weights / (weights.sum(dim=-1, keepdim=True).clamp(min=routing.least_sum) + routing.epsilon)
    weights = weights * routing.scale
    return Routes(experts.int(), weights if factors is None else weights * factors[experts])


def _in_used_groups(corrected: Tensor, routing: Routing) -> Tensor:
    """Return which experts are of the groups that a token uses, [tokens, experts]."""
    sums = corrected.unflatten(1, (routing.groups, -1)).topk(2, dim=-1).values.sum(dim=-1)
    used = sums.sort(dim=-1, descending=True, stable=True).indices[:, : routing.used_groups]
    is_used = torch.zeros_like(sums, dtype=torch.bool).scatter(1, used, True)
    return is_used.repeat_interleave(corrected.shape[1] // routing.groups, dim=1)


def route_triton(
    logits: Tensor, routing: Routing, correction: Tensor | None = None, factors: Tensor | None = None
) -> Routes:
    """route as one launch."""
    tokens, count = logits.shape[-2:]
    used, groups = routing.used, routing.groups
    experts = torch.empty((tokens, used), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, used), dtype=torch.float32, device=logits.device)
    _route_kernel[(tokens,)](
        logits,
        correction,
        factors,
        experts,
        weights,
        count,
        logits.stride(-2),
        tokens * count,
        PIECES=len(logits) if logits.dim() == 3 else 1,
        USED=used,
        SOFTMAX=routing.scoring == "softmax",
        NORMALISED=routing.normalised,
        EPSILON=routing.epsilon,
        LEAST_SUM=routing.least_sum,
        SCALE=routing.scale,
        LOGIT_SCALE=routing.logit_scale,
        GROUPS=groups,
        GROUP_SIZE=count // groups,
        USED_GROUPS=routing.used_groups,
        BLOCK=triton.next_power_of_2(count),
        BLOCK_USED=triton.next_power_of_2(used),
        BLOCK_GROUPS=triton.next_power_of_2(groups),
        num_warps=1,
        **early_launch(logits),
    )
    return Routes(experts, weights)


@triton.jit(do_not_specialize=["piece_stride"])
def _route_kernel(
    logits_ptr,
    correction_ptr,
    factors_ptr,
    experts_ptr,
    weights_ptr,
    count,
    stride,
    piece_stride,
    PIECES: tl.constexpr,
    USED: tl.constexpr,
    SOFTMAX: tl.constexpr,
    NORMALISED: tl.constexpr,
    EPSILON: tl.constexpr,
    LEAST_SUM: tl.constexpr,
    SCALE: tl.constexpr,
    LOGIT_SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    USED_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_USED: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    EARLY: tl.constexpr,
):
    CORRECTED: tl.constexpr = correction_ptr is not None
    HIDDEN: tl.constexpr = LOWEST + 1 if CORRECTED else -1  # the key of what nobody may choose
    TAKEN: tl.constexpr = HIDDEN - 1
    expert, rank = tl.arange(0, BLOCK), tl.arange(0, BLOCK_USED)
    exists = expert < count
    if CORRECTED:  # a weight, which the predecessor does not write
        correction = tl.load(correction_ptr + expert, mask=exists, other=0.0)
    wait_for_predecessor(EARLY)
    token = tl.program_id(0).to(tl.int64)
    place = logits_ptr + token * stride + expert
    wide = tl.load(place, mask=exists, other=float("-inf")).to(tl.float32)
    for piece in tl.static_range(1, PIECES):
        wide += tl.load(place + piece * piece_stride, mask=exists, other=0.0)
    if LOGIT_SCALE != 1:
        wide *= LOGIT_SCALE
    if SOFTMAX:
        scores = tl.exp(wide - tl.max(wide))
        total = tl.sum(scores)
        scores /= total
    else:
        scores = tl.sigmoid(wide)
        total = tl.sum(scores)
    # A warp reduces integers in one instruction. Scores are positive, so their bits are in their order.
    scores = tl.where(scores == scores, scores, 0.0)  # NaN must not hide the experts' numbers
    bits = scores.to(tl.int32, bitcast=True)
    keys = bits
    if CORRECTED:
        keys = _ordered(scores + correction)
    keys = tl.where(exists, keys, HIDDEN)
    if GROUPS > 1:
        keys = _hide_groups(keys, expert, GROUPS, GROUP_SIZE, USED_GROUPS, BLOCK, BLOCK_GROUPS, HIDDEN)
    experts = tl.zeros([BLOCK_USED], tl.int32)
    best = tl.zeros([BLOCK_USED], tl.int32)
    for i in tl.static_range(USED):
        top = tl.max(keys)
        index = tl.min(tl.where(keys == top, expert, BLOCK))
        experts = tl.where(rank == i, index, experts)
        if CORRECTED:
            top = tl.max(tl.where(expert == index, bits, 0))
        best = tl.where(rank == i, top, best)
        keys = tl.where(expert == index, TAKEN, keys)
    weights = best.to(tl.float32, bitcast=True)
    if NORMALISED:
        chosen = tl.sum(weights)
        if LEAST_SUM > 0:
            chosen = tl.maximum(chosen, LEAST_SUM)
        if EPSILON > 0:
            chosen += EPSILON
        weights = weights / chosen
    if SCALE != 1:
        weights *= SCALE
    if factors_ptr is not None:
        weights *= tl.load(factors_ptr + experts).to(tl.float32)
    weights = tl.where(total == total, weights, total)
    tl.store(experts_ptr + token * USED + rank, experts, mask=rank < USED)
    tl.store(weights_ptr + token * USED + rank, weights, mask=rank < USED)


@triton.jit
def _ordered(x):
    """Return integers in the order of the floats, which are not NaN, nor -0: among negative ones bits count down."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _float_of(key):
    """Return the float of which _ordered makes the key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _hide_groups(
    keys,
    expert,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    USED_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    HIDDEN: tl.constexpr,
):
    """Hide the experts of all groups but those that the token uses. keys: [BLOCK], of _ordered"""
    group, group_of = tl.arange(0, BLOCK_GROUPS), expert // GROUP_SIZE
    sums = tl.full([BLOCK_GROUPS], HIDDEN, tl.int32)
    for i in tl.static_range(GROUPS):
        own = tl.where(group_of == i, keys, HIDDEN)
        first = tl.max(own)
        index = tl.min(tl.where(own == first, expert, BLOCK))
        second = tl.max(tl.where(expert == index, HIDDEN, own))
        sums = tl.where(group == i, _ordered(_float_of(first) + _float_of(second)), sums)
    is_used = expert < 0
    for _ in tl.static_range(USED_GROUPS):
        index = tl.min(tl.where(sums == tl.max(sums), group, BLOCK_GROUPS))
        is_used |= group_of == index
        sums = tl.where(group == index, HIDDEN - 1, sums)
    return tl.where(is_used, keys, HIDDEN)


def most_tiles(choices: int, count: int, size: int) -> int:
    """Return how many tiles of `size` choices, each of one expert, any routing needs at most; of `count` experts."""
    return min(choices, choices // size + count)


def group_reference(experts: Tensor, count: int, size: int) -> Groups:
    """Sort all choices by their expert, and cut them into tiles.

    experts: [tokens, used] int32, each below count; no token chooses an expert twice
    size: choices in a tile, at most
    """
    flat = experts.flatten()
    counts = flat.bincount(minlength=count)
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
    block_used = triton.next_power_of_2(used)
    shape = {"USED": used, "BLOCK": block // block_used, "BLOCK_USED": block_used}
    options = {"num_warps": min(block // 256, 16), **early_launch(experts)}
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
        BLOCK_COUNT=triton.next_power_of_2(count),
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
