"""The cutoff below which tokens are not drawn: by top-k, then top-p, then min-p, as in transformers.

A cutoff is a logit and a token id. Tokens with a larger logit stay; of those with exactly this logit, the tokens from
this id on stay. The kernel finds the cutoff without sorting. Each pass over a row's logits tries a few pivots (possible
cutoffs), and measures how much lies above each: tokens, or probability. The next pass searches between two of them.
The CPU sorts as little as a row's settings allow.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
PIVOTS = 4  # per pass; more pivots would cost more in registers than they save in passes
NUM_WARPS = 32
LOG2_E = tl.constexpr(1.4426950408889634)
LANES = 64  # torch's sum of a row adds every so many numbers to one partial sum, or a divisor of it
FEW = 1 / 64  # of a vocabulary: torch.topk finds so many at once, far sooner than a sort ends
NEAR = 1e-6  # probabilities that differ by less, relatively, may change places if their sum is rounded otherwise

Cutoff = tuple[
    Tensor, Tensor
]  # [rows] float32 and [rows] int32: the lowest logit that stays, and the first id that stays with this logit


def find_cutoff(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Cutoff:
    """Find the least likely token of each row that may be drawn.

    logits: [rows, vocabulary]; temperatures: [rows] float32, all positive
    top_k: [rows] int32, at least 1: the k most likely tokens stay, and all that are as likely as the k-th
    top_p: [rows] float32; of these, the fewest most likely tokens stay whose probabilities add up to p. Among equally
        likely tokens, those with the larger ids stay. 1 keeps all
    min_p: [rows] float32; tokens go whose probability is less than this times that of the most likely token
    """
    function = find_cutoff_triton if logits.is_cuda else find_cutoff_cpu
    return function(logits, temperatures, top_k, top_p, min_p)


def find_cutoff_reference(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Cutoff:
    """find_cutoff in torch."""
    scores = _without_nan(logits)
    ascending, ids = scores.sort(dim=1, stable=True)
    first = _first_to_stay(ascending, temperatures, top_k, top_p, min_p)
    return ascending.gather(1, first).squeeze(1), ids.gather(1, first).squeeze(1).int()


def find_cutoff_cpu(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Cutoff:
    """find_cutoff in torch and NumPy, each row by the cheapest way that suits it. The same tokens stay, to the bit."""
    scores, vocabulary = _without_nan(logits), logits.shape[1]
    settings = temperatures, top_k, top_p, min_p
    lowest, first_ids = torch.empty(len(scores)), torch.empty(len(scores), dtype=torch.int32)
    suited: list[tuple[Callable[..., tuple[Tensor, Tensor, Tensor]], Tensor]] = [
        (_compare, (top_k >= vocabulary) & (top_p == 1)),
        (_sort_few, _size_of_few(top_k, vocabulary) <= vocabulary * FEW),
        (_sort_all, torch.ones_like(top_k, dtype=torch.bool)),
    ]
    left = torch.ones(len(scores), dtype=torch.bool)
    for find, suits in suited:
        rows = (left & suits).nonzero().squeeze(1)
        if len(rows):
            lowest[rows], first_ids[rows], is_found = find(scores[rows], *(setting[rows] for setting in settings))
            left[rows] = ~is_found
    return lowest, first_ids


def _without_nan(logits: Tensor) -> Tensor:
    return logits.float().nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))


def _first_to_stay(ascending: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return the place of each row's cutoff, [rows, 1]: what stands there and behind it stays.

    ascending: [rows, count] float32, sorted; those that are left out here would not stay
    """
    count = ascending.shape[1]
    kth = ascending.gather(1, count - top_k[:, None].long().clamp(max=count))
    probabilities = (ascending / temperatures[:, None]).masked_fill(ascending < kth, float("-inf")).softmax(dim=1)
    stays = (probabilities.cumsum(dim=1) > 1 - top_p[:, None]) | (top_p[:, None] == 1)
    stays[:, -1] = True
    stays &= (ascending >= kth) & (probabilities >= min_p[:, None] * probabilities[:, -1:])
    return stays.int().argmax(dim=1, keepdim=True)


def _compare(
    scores: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the cutoff of rows that have min-p alone; returns it, and of which rows it is sure, [rows] bool.

    A sum of probabilities depends on their order, in its last bits. A row with a token so near is not sure.
    """
    probabilities = (scores / temperatures[:, None]).softmax(dim=1)
    least = min_p[:, None] * probabilities.amax(dim=1, keepdim=True)
    is_near = ((probabilities - least).abs() <= least * NEAR).any(dim=1) | (least.squeeze(1) < 1e-30)
    lowest = scores.masked_fill(probabilities < least, float("inf")).amin(dim=1)
    return lowest, torch.zeros_like(lowest, dtype=torch.int32), ~is_near | (min_p == 0)


def _sort_few(scores: Tensor, temperatures: Tensor, *filters: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """_compare for rows with a top-k of few tokens; it is sure where it finds all that are as likely as the k-th."""
    top_k = filters[0]
    size = int(_size_of_few(top_k, scores.shape[1]).max())
    ascending = scores.topk(size).values.flip(1)
    kth = ascending.gather(1, size - top_k[:, None].long())
    return *_cutoff_in(ascending, scores, temperatures, *filters), ascending[:, 0] < kth.squeeze(1)


def _size_of_few(top_k: Tensor, vocabulary: int) -> Tensor:
    """Return how many tokens to take for a top-k, [rows]: more than k, and so that each keeps its lane in a sum."""
    return top_k.long() * 2 // LANES * LANES + LANES + vocabulary % LANES


def _sort_all(scores: Tensor, *settings: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """_compare for rows with any settings; NumPy sorts numbers alone, in a quarter of torch's time."""
    ascending = torch.from_numpy(np.sort(scores.numpy(), axis=1))
    return *_cutoff_in(ascending, scores, *settings), torch.ones(len(scores), dtype=torch.bool)


def _cutoff_in(ascending: Tensor, scores: Tensor, *settings: Tensor) -> Cutoff:
    """Find the cutoff of rows by their largest scores, sorted; of equal ones the smaller ids come first."""
    first = _first_to_stay(ascending, *settings)
    lowest = ascending.gather(1, first)
    num_equal = ascending.shape[1] - first.squeeze(1) - (ascending > lowest).sum(dim=1)  # of those that stay
    equal = scores == lowest
    ends = equal.sum(dim=1).cumsum(0)
    return lowest.squeeze(1), equal.nonzero()[ends - num_equal, 1].int()


def find_cutoff_triton(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Cutoff:
    """find_cutoff as one launch, a program a row."""
    rows, vocabulary = logits.shape
    lowest = torch.empty(rows, dtype=torch.float32, device=logits.device)
    first_ids = torch.empty(rows, dtype=torch.int32, device=logits.device)
    _find_cutoff_kernel[(rows,)](
        logits,
        temperatures,
        top_k,
        top_p,
        min_p,
        lowest,
        first_ids,
        vocabulary,
        logits.stride(0),
        BLOCK=BLOCK,
        PIVOTS=PIVOTS,
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )
    return lowest, first_ids


@triton.jit
def _find_cutoff_kernel(
    logits_ptr,
    temperatures_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    lowest_ptr,
    first_ids_ptr,
    vocabulary,
    row_stride,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    row = tl.program_id(0)
    source = logits_ptr + row.to(tl.int64) * row_stride
    temperature, top_k = tl.load(temperatures_ptr + row), tl.load(top_k_ptr + row)
    top_p, min_p = tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)

    bottom, top = _range(source, vocabulary, BLOCK)
    above = top + tl.maximum(tl.abs(top) * 1e-6, 1e-30)  # just above the largest logit
    lowest, first_id = bottom, 0
    if top_k < vocabulary:
        lowest = _kth(source, vocabulary, top_k, bottom, above, BLOCK, PIVOTS)
    if top_p < 1:
        scale = LOG2_E / temperature
        lowest, share = _crossing(source, vocabulary, top_p, top, scale, lowest, above, BLOCK, PIVOTS)
        share = tl.where(share < vocabulary, share, vocabulary)  # also for NaN: one token's weight may be 0
        first_id = _nth_last(source, vocabulary, lowest, tl.maximum(tl.ceil(share).to(tl.int32), 1), BLOCK)
    least = tl.where(min_p > 0, top + temperature * tl.log(tl.maximum(min_p, 1e-30)), float("-inf"))
    tl.store(lowest_ptr + row, tl.maximum(lowest, least))
    tl.store(first_ids_ptr + row, tl.where(least > lowest, 0, first_id))


@triton.jit
def _load(source, start, vocabulary, BLOCK: tl.constexpr):
    """Load [BLOCK, 1] logits as float32; -inf beyond the vocabulary and for NaN."""
    column = start + tl.arange(0, BLOCK)[:, None]
    x = tl.load(source + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def _range(source, vocabulary, BLOCK: tl.constexpr):
    """Return the smallest and the largest finite logit."""
    smallest = tl.full((BLOCK, 1), float("inf"), tl.float32)
    largest = tl.full((BLOCK, 1), float("-inf"), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        x = _load(source, start, vocabulary, BLOCK)
        smallest = tl.minimum(smallest, tl.where(x > float("-inf"), x, float("inf")))
        largest = tl.maximum(largest, tl.where(x < float("inf"), x, float("-inf")))
    return tl.min(smallest), tl.max(largest)


@triton.jit
def _pivots(low, high, PIVOTS: tl.constexpr):
    """Return [1, PIVOTS] numbers that divide the range from low to high evenly."""
    fraction = (tl.arange(0, PIVOTS)[None, :] + 1).to(tl.float32) / (PIVOTS + 1)
    return low * (1 - fraction) + high * fraction


@triton.jit
def _extremes(x, low, high, smallest, largest):
    """Update `smallest` and `largest` by those numbers of x that are at least `low` and below `high`."""
    between = (x >= low) & (x < high)
    smallest = tl.minimum(smallest, tl.where(between, x, float("inf")))
    return smallest, tl.maximum(largest, tl.where(between, x, float("-inf")))


@triton.jit
def _narrow(low, high, nearest, pivots, enough):
    """Narrow a search from `low` up to below `high` to the range between two pivots.

    nearest: the smallest logit in the range
    enough: [1, PIVOTS], whether enough lies at or above each pivot; the new range begins at the last such pivot
    Returns low, high, and whether both are unchanged. Numbers are rounded, so it may be that no pivot falls between two
    neighbouring logits. Then the next pivot must be the larger of the two.
    """
    next_low = tl.maximum(nearest, tl.max(tl.where(enough, pivots, low)))
    next_high = tl.min(tl.where(enough, high, pivots))
    return next_low, next_high, (next_low == low) & (next_high == high)


@triton.jit
def _kth(source, vocabulary, k, low, high, BLOCK: tl.constexpr, PIVOTS: tl.constexpr):
    """Return a lower bound of the k largest logits, and of those equal to the k-th, that is above all other logits.

    low: at least k logits are >= low, if there are k; high: fewer than k are >= high
    """
    searching = True
    farthest = high
    stuck = False
    while searching:
        pivots = tl.where(stuck, farthest, _pivots(low, high, PIVOTS))
        counts = tl.zeros((BLOCK, PIVOTS), tl.int32)
        smallest = tl.full((BLOCK, 1), float("inf"), tl.float32)
        largest = tl.full((BLOCK, 1), float("-inf"), tl.float32)
        for start in range(0, vocabulary, BLOCK):
            x = _load(source, start, vocabulary, BLOCK)
            counts += (x >= pivots).to(tl.int32)
            smallest, largest = _extremes(x, low, high, smallest, largest)
        count = tl.sum(counts, axis=0)[None, :]
        nearest, farthest = tl.min(smallest), tl.max(largest)
        enough = count >= k
        exact = tl.sum((count == k).to(tl.int32)) > 0
        low, high, stuck = _narrow(low, high, nearest, pivots, enough)
        searching = (nearest < farthest) & (exact == 0)
    return low


@triton.jit
def _crossing(source, vocabulary, p, top, scale, low, high, BLOCK: tl.constexpr, PIVOTS: tl.constexpr):
    """Find the logit at which the probabilities, added from the largest logit down, first reach p of their sum.

    low: smaller logits count as probability 0; high: above all logits
    Returns the logit, and how many of the tokens with just this logit it takes to reach p, not rounded to an integer.
    """
    cutoff = low
    mass_above = 0.0
    target = 0.0
    searching = True
    farthest = high
    stuck = False
    while searching:
        pivots = tl.where(stuck, farthest, _pivots(low, high, PIVOTS))
        masses = tl.zeros((BLOCK, PIVOTS), tl.float32)
        wholes = tl.zeros((BLOCK, 1), tl.float32)
        smallest = tl.full((BLOCK, 1), float("inf"), tl.float32)
        largest = tl.full((BLOCK, 1), float("-inf"), tl.float32)
        for start in range(0, vocabulary, BLOCK):
            x = _load(source, start, vocabulary, BLOCK)
            weight = tl.where(x >= cutoff, tl.exp2((x - top) * scale), 0.0)
            wholes += weight
            masses += tl.where(x >= pivots, weight, 0.0)
            smallest, largest = _extremes(x, low, high, smallest, largest)
        mass = tl.sum(masses, axis=0)[None, :]
        target = p * tl.sum(wholes)
        nearest, farthest = tl.min(smallest), tl.max(largest)
        searching = nearest < farthest
        if searching:
            enough = mass >= target
            low, high, stuck = _narrow(low, high, nearest, pivots, enough)
            mass_above = tl.max(tl.where(enough, mass_above, mass))
        else:
            low = nearest
    return low, (target - mass_above) / tl.exp2((low - top) * scale)


@triton.jit
def _nth_last(source, vocabulary, value, n, BLOCK: tl.constexpr):
    """Return the id of the n-th token, from the end, whose logit is `value`; 0 if there are fewer."""
    found = 0
    start = (tl.cdiv(vocabulary, BLOCK) - 1) * BLOCK
    while start >= 0:
        column = start + tl.arange(0, BLOCK)
        x = tl.load(source + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
        is_equal = (x == value).to(tl.int32)
        count = tl.sum(is_equal)
        if count >= n:
            from_end = tl.cumsum(is_equal, axis=0, reverse=True)
            found = tl.max(tl.where((is_equal > 0) & (from_end == n), column, 0))
            start = -BLOCK
        else:
            n -= count
            start -= BLOCK
    return found
