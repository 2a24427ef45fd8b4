"""Entropies of the distributions that tokens are drawn from, in one pass over the logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import cdiv, launch_options, next_power_of_2, wait_for_predecessor
from nanoinfer.kernels.sampling.cutoff import Cutoff

BLOCK = 4096  # tokens in a slice of the vocabulary


def entropy_parts(
    logits: Tensor,
    temperatures: Tensor,
    places: Tensor | None = None,
    cutoff: Cutoff | None = None,
    width: int | None = None,
) -> Tensor:
    """Read what `entropies` puts together: [lines, slices, 3] float32 of slices of the vocabulary.

    logits: [places, vocabulary], or a share of it; temperatures: [lines] float32, of which 0 counts as 1
    places: [lines] int64, where the lines stand among all; None: they are all
    cutoff: no token below it is drawn, see kernels.sampling.cutoff; the logits are those of the whole vocabulary then
    width: there are as many slices as of so many tokens, some of them empty; None: of those that there are

    The three are the largest logit / T, the sum of the weights exp(logit / T - largest), and the sum of the weights
    times these differences.
    """
    function = entropy_parts_triton if logits.is_cuda else entropy_parts_reference
    return function(logits, temperatures, places, cutoff, width)


def entropies(parts: Tensor, temperatures: Tensor) -> Tensor:
    """Return the entropies of lines in nats, [lines] float32, from all their parts; at temperature 0 they are 0.

    They are NaN where a logit is NaN or infinite, and where no token may be drawn.
    """
    return (entropies_triton if parts.is_cuda else entropies_reference)(parts, temperatures)


def entropies_reference(parts: Tensor, temperatures: Tensor) -> Tensor:
    """entropies in torch."""
    largest, sums, moments = parts.unbind(dim=2)
    most = largest.amax(dim=1, keepdim=True)
    shifts = (largest - most).masked_fill(largest.isneginf(), 0)  # such a slice has no weight
    weights = shifts.exp()
    total = (sums * weights).sum(dim=1)
    moment = ((moments + sums * shifts) * weights).sum(dim=1)
    return (total.log() - moment / total).clamp(min=0).masked_fill(temperatures == 0, 0)


def entropies_triton(parts: Tensor, temperatures: Tensor) -> Tensor:
    """entropies as one launch."""
    lines, slices, _ = parts.shape
    out = torch.empty(lines, dtype=torch.float32, device=parts.device)
    block = next_power_of_2(slices)
    _row_kernel[(lines,)](parts.contiguous(), temperatures, out, slices, BLOCK=block, **launch_options(parts))
    return out


def entropy_parts_reference(
    logits: Tensor,
    temperatures: Tensor,
    places: Tensor | None = None,
    cutoff: Cutoff | None = None,
    width: int | None = None,
) -> Tensor:
    """entropy_parts in torch, as one slice."""
    scores = (logits if places is None else logits[places]).float()
    if cutoff is not None:
        lowest, first = (column[:, None] for column in cutoff)
        ids = torch.arange(scores.shape[1], device=scores.device)
        scores = scores.where((scores > lowest) | ((scores == lowest) & (ids >= first)), float("-inf"))
    scores = scores / temperatures.where(temperatures > 0, 1)[:, None]
    largest = scores.amax(dim=1, keepdim=True)
    shifted = scores - largest.masked_fill(largest.isneginf(), 0)
    weights = shifted.exp()
    moments = (weights * shifted.masked_fill(shifted.isneginf(), 0)).sum(dim=1)
    return torch.stack([largest[:, 0], weights.sum(dim=1), moments], dim=1)[:, None]


def entropy_parts_triton(
    logits: Tensor,
    temperatures: Tensor,
    places: Tensor | None = None,
    cutoff: Cutoff | None = None,
    width: int | None = None,
) -> Tensor:
    """entropy_parts as one launch."""
    lines, slices = len(temperatures), cdiv(width or logits.shape[1], BLOCK)
    parts = torch.empty((lines, slices, 3), dtype=torch.float32, device=logits.device)
    _slice_kernel[(lines, slices)](
        logits,
        temperatures,
        places,
        *(cutoff or (None, None)),
        parts,
        logits.shape[1],
        logits.stride(0),
        BLOCK=BLOCK,
        HAS_CUTOFF=cutoff is not None,
        HAS_PLACES=places is not None,
        **launch_options(logits),
    )
    return parts


@triton.jit
def _slice_kernel(
    logits_ptr,
    temperatures_ptr,
    places_ptr,
    lowest_ptr,
    first_ids_ptr,
    parts_ptr,
    vocabulary,
    row_stride,
    BLOCK: tl.constexpr,
    HAS_CUTOFF: tl.constexpr,
    HAS_PLACES: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY)
    line, slice_id, slices = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    place = line.to(tl.int64)
    if HAS_PLACES:
        place = tl.load(places_ptr + line)
    column = slice_id * BLOCK + tl.arange(0, BLOCK)
    scores = tl.load(logits_ptr + place * row_stride + column, mask=column < vocabulary, other=float("-inf"))
    scores = scores.to(tl.float32)
    if HAS_CUTOFF:
        lowest, first = tl.load(lowest_ptr + line), tl.load(first_ids_ptr + line)
        scores = tl.where((scores > lowest) | ((scores == lowest) & (column >= first)), scores, float("-inf"))
    temperature = tl.load(temperatures_ptr + line)
    scores = scores / tl.where(temperature > 0, temperature, 1.0)
    has_nan = tl.max((scores != scores).to(tl.int32), axis=0) > 0
    largest = tl.max(scores, axis=0)
    shifted = scores - tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp(shifted)
    moments = tl.where(shifted == float("-inf"), 0.0, weights * shifted)
    parts = parts_ptr + (line * slices + slice_id) * 3
    tl.store(parts, tl.where(has_nan, float("nan"), largest))
    tl.store(parts + 1, tl.sum(weights, axis=0))
    tl.store(parts + 2, tl.sum(moments, axis=0))


@triton.jit
def _row_kernel(parts_ptr, temperatures_ptr, out_ptr, slices, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    wait_for_predecessor(EARLY)
    line, i = tl.program_id(0), tl.arange(0, BLOCK)
    parts, mask = parts_ptr + (line * slices + i) * 3, i < slices
    largest = tl.load(parts, mask=mask, other=float("-inf"))
    sums, moments = tl.load(parts + 1, mask=mask, other=0.0), tl.load(parts + 2, mask=mask, other=0.0)
    has_nan = tl.max((largest != largest).to(tl.int32), axis=0) > 0
    shifts = tl.where(largest == float("-inf"), 0.0, largest - tl.max(largest, axis=0))
    weights = tl.exp(shifts)
    total = tl.sum(sums * weights, axis=0)
    entropy = tl.log(total) - tl.sum((moments + sums * shifts) * weights, axis=0) / total
    entropy = tl.where(has_nan, float("nan"), tl.where(entropy < 0, 0.0, entropy))
    tl.store(out_ptr + line, tl.where(tl.load(temperatures_ptr + line) > 0, entropy, 0.0))
