"""Routing: each token's router logits choose its experts and their weights (Shazeer et al., 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import launch_options, next_power_of_2, wait_for_predecessor

RouterScoring = Literal["softmax", "sigmoid", "sparsemixer"]

LOWEST = tl.constexpr(-(2**31))


@dataclass(frozen=True)
class Routing:
    """How logits choose the experts of a token, and weigh them.

    used: experts that a token uses: those of its largest scores
    scoring: the function that turns logits into scores: softmax over the experts, or the sigmoid of each. In
        "sparsemixer" one expert is chosen after the other, by the largest logit. Its score is that of softmax over
        those not yet chosen that are near it (SparseMixer-v2, Liu et al., 2024). It takes no corrections, nor groups
    normalised: a token's weights are its chosen scores divided by their sum; else the scores themselves
    epsilon: is added to that sum; least_sum: the sum counts as so much if it is less
    scale: factor of the weights; logit_scale: of the logits
    corrects_logits: a correction is added to the logits, and the experts with the largest sums are chosen
    nearness: of sparsemixer: from the largest logit, such a logit x is at most so many times as far as the larger of
        |x| and the largest
    groups: the experts form so many groups of neighbours, all of one size, at least two
    used_groups: a token's experts are of so many groups: those whose two largest scores have the largest sums
        (DeepSeek-V3 Technical Report, 2024)
    by_largest: the groups with the largest scores instead (DeepSeek-V2, 2024)
    identities: so many of the last choices are no experts: they give back the token's vector (LongCat-Flash, Meituan,
        2025)
    always: so many further experts, with the numbers behind those that are chosen among, are each token's last ones.
        Their weight is 1
    """

    used: int
    scoring: RouterScoring = "softmax"
    normalised: bool = False
    epsilon: float = 0.0
    least_sum: float = 0.0
    scale: float = 1.0
    logit_scale: float = 1.0
    corrects_logits: bool = False
    nearness: float = 0.0
    groups: int = 1
    used_groups: int = 1
    by_largest: bool = False
    identities: int = 0
    always: int = 0

    @property
    def taken(self) -> int:
        """How many experts a token takes: those that it uses, and those that all do."""
        return self.used + self.always


class Routes(NamedTuple):
    """The experts that tokens take, the likeliest first, and those behind them that all tokens take.

    experts: [tokens, taken] int32
    weights: [tokens, taken] float32, the factor of each expert's result
    """

    experts: Tensor
    weights: Tensor


def route(logits: Tensor, routing: Routing, correction: Tensor | None = None, factors: Tensor | None = None) -> Routes:
    """Choose each token's experts, and weigh them. Among equal scores the first experts win, and the first groups.

    If a token's logits are NaN, its weights are NaN, and its experts are any.
    logits: [tokens, experts], or [pieces, tokens, experts] float32 that add up to it
    correction: [experts] float32, finite, added to the scores, or logits, for the choice alone: weights come from the
        scores (Wang et al., 2024); None: nothing is added
    factors: [experts], a factor of each expert's weights, as in Gemma 4; None: the model has none
    """
    return (route_triton if logits.is_cuda else route_reference)(logits, routing, correction, factors)


def route_reference(
    logits: Tensor, routing: Routing, correction: Tensor | None = None, factors: Tensor | None = None
) -> Routes:
    """route in torch."""
    wide = (logits if logits.dim() == 2 else logits.sum(dim=0)).float() * routing.logit_scale
    experts, weights = (_mix_sparsely if routing.scoring == "sparsemixer" else _choose)(wide, routing, correction)
    if routing.normalised:
        weights = weights / (weights.sum(dim=-1, keepdim=True).clamp(min=routing.least_sum) + routing.epsilon)
    weights = weights * routing.scale
    weights = weights if factors is None else weights * factors[experts]
    if routing.always:
        further = torch.arange(routing.always, device=wide.device) + wide.shape[1]
        experts = torch.cat([experts, further.expand(len(wide), -1)], dim=1)
        weights = F.pad(weights, (0, routing.always), value=1.0)
    return Routes(experts.int(), weights)


def _choose(wide: Tensor, routing: Routing, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return experts and their scores, both [tokens, used]. wide: [tokens, experts] float32"""
    scores = wide.softmax(dim=-1) if routing.scoring == "softmax" else wide.sigmoid()
    corrected = scores if correction is None else (wide if routing.corrects_logits else scores) + correction
    if routing.groups > 1:
        corrected = corrected.masked_fill(~_in_used_groups(corrected, routing), float("-inf"))
    experts = corrected.sort(dim=-1, descending=True, stable=True).indices[:, : routing.used]
    return experts, scores.gather(1, experts)


def _mix_sparsely(wide: Tensor, routing: Routing, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the same by sparsemixer."""
    assert correction is None
    left, experts, weights = wide, [], []
    for _ in range(routing.used):
        index = left.argmax(dim=-1, keepdim=True)
        largest = left.gather(1, index)
        is_far = (largest - wide) / wide.abs().maximum(largest) > routing.nearness
        experts.append(index)
        weights.append(left.masked_fill(is_far, float("-inf")).softmax(dim=-1).gather(1, index))
        left = left.scatter(1, index, float("-inf"))
    are_numbers = ~wide.isnan().any(dim=-1, keepdim=True)
    return torch.cat(experts, dim=1), torch.cat(weights, dim=1).where(are_numbers, float("nan"))


def _in_used_groups(corrected: Tensor, routing: Routing) -> Tensor:
    """Return which experts are of the groups that a token uses, [tokens, experts]."""
    counted = 1 if routing.by_largest else 2
    sums = corrected.unflatten(1, (routing.groups, -1)).topk(counted, dim=-1).values.sum(dim=-1)
    used = sums.sort(dim=-1, descending=True, stable=True).indices[:, : routing.used_groups]
    is_used = torch.zeros_like(sums, dtype=torch.bool).scatter(1, used, True)
    return is_used.repeat_interleave(corrected.shape[1] // routing.groups, dim=1)


def route_triton(
    logits: Tensor, routing: Routing, correction: Tensor | None = None, factors: Tensor | None = None
) -> Routes:
    """route as one launch."""
    tokens, count = logits.shape[-2:]
    taken, groups = routing.taken, routing.groups
    experts = torch.empty((tokens, taken), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, taken), dtype=torch.float32, device=logits.device)
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
        USED=routing.used,
        ALWAYS=routing.always,
        SCORING=routing.scoring,
        NORMALISED=routing.normalised,
        EPSILON=routing.epsilon,
        LEAST_SUM=routing.least_sum,
        SCALE=routing.scale,
        LOGIT_SCALE=routing.logit_scale,
        CORRECTS_LOGITS=routing.corrects_logits,
        NEARNESS=routing.nearness,
        GROUPS=groups,
        GROUP_SIZE=count // groups,
        USED_GROUPS=routing.used_groups,
        BY_LARGEST=routing.by_largest,
        BLOCK=next_power_of_2(count),
        BLOCK_TAKEN=next_power_of_2(taken),
        BLOCK_GROUPS=next_power_of_2(groups),
        num_warps=1,
        **launch_options(logits),
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
    ALWAYS: tl.constexpr,
    SCORING: tl.constexpr,
    NORMALISED: tl.constexpr,
    EPSILON: tl.constexpr,
    LEAST_SUM: tl.constexpr,
    SCALE: tl.constexpr,
    LOGIT_SCALE: tl.constexpr,
    CORRECTS_LOGITS: tl.constexpr,
    NEARNESS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    USED_GROUPS: tl.constexpr,
    BY_LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_TAKEN: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    EARLY: tl.constexpr,
):
    CORRECTED: tl.constexpr = correction_ptr is not None
    SPARSE: tl.constexpr = SCORING == "sparsemixer"
    HIDDEN: tl.constexpr = LOWEST + 1 if CORRECTED or SPARSE else -1  # the key of what nobody may choose
    TAKEN: tl.constexpr = HIDDEN - 1
    expert, rank = tl.arange(0, BLOCK), tl.arange(0, BLOCK_TAKEN)
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
    if SPARSE:
        scores = wide
        total = tl.sum(tl.where(exists, wide, 0.0))
    elif SCORING == "softmax":
        scores = tl.exp(wide - tl.max(wide))
        total = tl.sum(scores)
        scores /= total
    else:
        scores = tl.sigmoid(wide)
        total = tl.sum(scores)
    # A warp reduces integers in one instruction. Most scores are positive, so their bits are in their order.
    scores = tl.where(scores == scores, scores, 0.0)  # NaN must not hide the experts' numbers
    bits = scores.to(tl.int32, bitcast=True)
    keys = bits
    if CORRECTED:
        corrected = tl.where(wide == wide, wide, 0.0) if CORRECTS_LOGITS else scores
        keys = _ordered(corrected + correction)
    elif SPARSE:
        keys = _ordered(scores)
    keys = tl.where(exists, keys, HIDDEN)
    if GROUPS > 1:
        keys = _hide_groups(keys, expert, GROUPS, GROUP_SIZE, USED_GROUPS, BY_LARGEST, BLOCK, BLOCK_GROUPS, HIDDEN)
    experts = tl.zeros([BLOCK_TAKEN], tl.int32)
    best = tl.zeros([BLOCK_TAKEN], tl.int32)
    for i in tl.static_range(USED):
        top = tl.max(keys)
        index = tl.min(tl.where(keys == top, expert, BLOCK))
        experts = tl.where(rank == i, index, experts)
        if CORRECTED:
            top = tl.max(tl.where(expert == index, bits, 0))
        if SPARSE:
            top = _share_of_largest(scores, keys > HIDDEN, _float_of(top), NEARNESS).to(tl.int32, bitcast=True)
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
    if ALWAYS > 0:
        experts = tl.where(rank < USED, experts, count + rank - USED)
        weights = tl.where(rank < USED, weights, 1.0)
    WIDTH: tl.constexpr = USED + ALWAYS
    tl.store(experts_ptr + token * WIDTH + rank, experts, mask=rank < WIDTH)
    tl.store(weights_ptr + token * WIDTH + rank, weights, mask=rank < WIDTH)


@triton.jit
def _ordered(x):
    """Return integers in the order of the floats, which are not NaN: among negative ones bits count down; -0 is one."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _float_of(key):
    """Return the float of which _ordered makes the key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _share_of_largest(logits, is_left, largest, NEARNESS: tl.constexpr):
    """Return what softmax over the logits that are left, and near the largest of these, gives to this one."""
    is_far = (largest - logits) / tl.maximum(tl.abs(logits), largest) > NEARNESS
    return 1 / tl.sum(tl.where(is_left & ~is_far, tl.exp(logits - largest), 0.0))


@triton.jit
def _hide_groups(
    keys,
    expert,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    USED_GROUPS: tl.constexpr,
    BY_LARGEST: tl.constexpr,
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
        if BY_LARGEST:
            sums = tl.where(group == i, first, sums)
        else:
            index = tl.min(tl.where(own == first, expert, BLOCK))
            second = tl.max(tl.where(expert == index, HIDDEN, own))
            sums = tl.where(group == i, _ordered(_float_of(first) + _float_of(second)), sums)
    is_used = expert < 0
    for _ in tl.static_range(USED_GROUPS):
        index = tl.min(tl.where(sums == tl.max(sums), group, BLOCK_GROUPS))
        is_used |= group_of == index
        sums = tl.where(group == index, HIDDEN - 1, sums)
    return tl.where(is_used, keys, HIDDEN)
