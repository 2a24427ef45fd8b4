"""Sampling: argmax(logits / T + Gumbel noise), with noise that depends on (seed, position, token id) alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from nanoinfer.kernels.launch import cdiv, launch_options, next_power_of_2, wait_for_predecessor
from nanoinfer.kernels.sampling.cutoff import Cutoff
from nanoinfer.kernels.sampling.masks import apply_masks_reference

UInts = npt.NDArray[np.uint32]  # NumPy's unsigned integers wrap around; torch cannot multiply its own

BLOCK = 4096  # tokens in a slice of the vocabulary
NO_TOKEN = -1  # in place of a token id, where logits are not finite
NONE_LEFT = -2  # in place of a token id, where settings leave no token that may be drawn
_NONE_LEFT = tl.constexpr(NONE_LEFT)
LN_2 = tl.constexpr(0.6931471805599453)


def draw(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    first_id: int = 0,
    cutoff: Cutoff | None = None,
    marks: bool = False,
) -> tuple[Tensor, Tensor]:
    """Draw one token a row by the Gumbel-max trick (Gumbel, 1954); temperature 0 takes the largest logit.

    logits: [rows, vocabulary], or this rank's share of it, which begins at token `first_id`
    temperatures: [rows] float32
    seeds: [rows] int64, not negative
    positions: [rows] int32, the position in its sequence of the token that is drawn
    cutoff: no token below it is drawn, see kernels.sampling.cutoff
    marks: a row whose best is not finite has NO_TOKEN for its id
    Returns each row's largest logit / T + noise, [rows] float32, and its token id, [rows] int32. Among equals the
    smallest id wins. NaN wins over no other logit, but without a cutoff makes the row's best infinite.
    """
    function = draw_triton if logits.is_cuda else draw_reference
    return function(logits, temperatures, seeds, positions, first_id, cutoff, marks)


class DrawnLines(NamedTuple):
    """Lines of logits that are drawn. Of those in one place, all are alike.

    places: [lines] int64, where they stand among all places
    rows: [lines] int64, whose temperatures and seeds they take
    masks: [lines, words] int32, as for apply_masks; None: all tokens may be drawn
    """

    places: Tensor
    rows: Tensor
    masks: Tensor | None = None


def draw_lines(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    lines: DrawnLines,
    token_ids: Tensor,
    cutoff: Cutoff | None = None,
    picked: bool = False,
) -> None:
    """Draw in some places, as `draw` does.

    logits: [places, vocabulary]; picked: [lines, vocabulary], of these lines alone
    temperatures, seeds: [rows]; positions: [places]; cutoff: of the lines; each as for `draw`
    token_ids: [places] int32, in which the new tokens take their places, NONE_LEFT where a mask and the logits leave
        none. Where it is negative, it stays
    """
    function = draw_lines_triton if logits.is_cuda else draw_lines_reference
    function(logits, temperatures, seeds, positions, lines, token_ids, cutoff, picked)


def draw_reference(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    first_id: int = 0,
    cutoff: Cutoff | None = None,
    marks: bool = False,
) -> tuple[Tensor, Tensor]:
    """draw in torch."""
    scores = logits.float().nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    ids = torch.arange(first_id, first_id + logits.shape[1], device=logits.device)
    if cutoff is not None:
        lowest, first = (column[:, None] for column in cutoff)
        scores = scores.masked_fill((scores < lowest) | ((scores == lowest) & (ids < first)), float("-inf"))
    drawn = (temperatures > 0).nonzero().squeeze(1)
    if len(drawn):
        rows = drawn if len(drawn) < len(scores) else slice(None)
        noise = gumbel_noise(seeds[rows, None], positions[rows, None], ids)
        scores[rows] = noise.add_(scores[rows] * (1 / temperatures[rows, None]))
    best, index = scores.max(dim=1)
    if cutoff is None:
        best = best.masked_fill(logits.amax(dim=1).isnan(), float("inf"))  # amax of NaN and others is NaN
    ids = (index + first_id).int()
    return best, ids.where(best.isfinite(), NO_TOKEN) if marks else ids


def draw_lines_reference(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    lines: DrawnLines,
    token_ids: Tensor,
    cutoff: Cutoff | None = None,
    picked: bool = False,
) -> None:
    """draw_lines in torch."""
    places, rows, masks = lines
    own = logits if picked else logits[places]
    if masks is not None:
        own = apply_masks_reference(own.float(), masks)
    best, ids = draw_reference(own, temperatures[rows], seeds[rows], positions[places], cutoff=cutoff)
    before = token_ids[places]
    token_ids[places] = before.where(before < 0, ids.masked_fill(best.isneginf(), NONE_LEFT))


def gumbel_noise(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Make standard Gumbel noise, -log(-log(1 - u)), from a counter-based generator.

    seeds, positions and token_ids broadcast against each other; returns float32. The generator makes 32 bits, and
    u = (bits + 1/2) / 2^32 in float32, kept below 1. Small u make the large noise that decides, down to a u of 2^-33.
    """
    key, factor = noise_key(seeds, positions)
    bits = torch.from_numpy(_mix(token_ids.cpu().numpy().astype(np.uint32) * factor + key))
    minus_u = bits.to(seeds.device).float().add_(0.5).mul_(-(2.0**-32)).clamp_(min=2.0**-24 - 1)
    return minus_u.log1p_().neg_().log_().neg_()


def noise_key(seeds: Tensor, positions: Tensor) -> tuple[UInts, UInts]:
    """Make the key and the odd factor from which the noise of all tokens at a position comes.

    seeds and positions broadcast against each other. At one position no two seeds have the same key and factor. In
    turn, a hash of one half of a seed changes the other half, and every such step can be undone.
    """
    seed = seeds.cpu().numpy()
    low, high = seed.astype(np.uint32), (seed >> 32).astype(np.uint32)  # 32 and 31 bits
    high = high ^ _mix(low) >> np.uint32(1)
    low = low ^ _mix(high + positions.cpu().numpy().astype(np.uint32))
    high = high ^ _mix(low) >> np.uint32(1)
    low = low ^ _mix(high)
    return low, high << np.uint32(1) | np.uint32(1)


def _mix(x: UInts) -> UInts:
    """Apply a bijection of 32-bit integers with low bias: the "lowbias32" of Wellons' hash-prospector."""
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    return x ^ x >> np.uint32(16)


def draw_triton(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    first_id: int = 0,
    cutoff: Cutoff | None = None,
    marks: bool = False,
) -> tuple[Tensor, Tensor]:
    """draw as two launches: one finds the best token of each slice of the vocabulary, the next the best slice."""
    rows = len(logits)
    best, ids = _draw_slices(rows, logits, temperatures, seeds, positions, first_id, cutoff)
    row_best = torch.empty(rows, dtype=torch.float32, device=logits.device)
    row_ids = torch.empty(rows, dtype=torch.int32, device=logits.device)
    _choose_slices(best, ids, row_best, row_ids, marks=marks)
    return row_best, row_ids


def draw_lines_triton(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    lines: DrawnLines,
    token_ids: Tensor,
    cutoff: Cutoff | None = None,
    picked: bool = False,
) -> None:
    """draw_lines as two launches, like those of draw_triton."""
    how = temperatures, seeds, positions
    best, ids = _draw_slices(len(lines.places), logits, *how, cutoff=cutoff, lines=lines, picked=picked)
    _choose_slices(best, ids, None, token_ids, lines.places)


def _draw_slices(
    rows: int,
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    first_id: int = 0,
    cutoff: Cutoff | None = None,
    lines: DrawnLines | None = None,
    picked: bool = False,
) -> tuple[Tensor, Tensor]:
    """Draw the best token of each slice, of rows or of lines; returns its score and its id, both [rows, slices]."""
    slices = cdiv(logits.shape[1], BLOCK)
    best = torch.empty((rows, slices), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, slices), dtype=torch.int32, device=logits.device)
    masks = None if lines is None else lines.masks
    _draw_slice_kernel[(rows, slices)](
        logits,
        temperatures,
        seeds,
        positions,
        *(cutoff or (None, None)),
        *(lines or (None, None, None)),
        best,
        ids,
        logits.shape[1],
        logits.stride(0),
        0 if masks is None else masks.shape[1],
        first_id,
        BLOCK=BLOCK,
        HAS_CUTOFF=cutoff is not None,
        HAS_LINES=lines is not None,
        HAS_MASKS=masks is not None,
        PICKED=picked,
        COMPILED=logits.is_cuda,
        **launch_options(logits),
    )
    return best, ids


def _choose_slices(
    best: Tensor, ids: Tensor, told: Tensor | None, row_ids: Tensor, places: Tensor | None = None, marks: bool = False
) -> None:
    """Choose each row's best slice; told: gets its score. places: where lines stand, as draw_lines has them"""
    rows, slices = best.shape
    _best_slice_kernel[(rows,)](
        best,
        ids,
        told,
        row_ids,
        places,
        slices,
        BLOCK=next_power_of_2(slices),
        MARKS=marks,
        HAS_PLACES=places is not None,
        **launch_options(best),
    )


@triton.jit
def _mix_triton(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _log(x, COMPILED: tl.constexpr):
    """Use the device's instruction for log2, accurate to 2^-22; Triton's own log is a polynomial of 20 instructions."""
    return LN_2 * (libdevice.fast_log2f(x) if COMPILED else tl.log2(x))


@triton.jit
def _gumbel_noise_triton(seed, position, token_ids, COMPILED: tl.constexpr):
    low, high = (seed & 0xFFFFFFFF).to(tl.uint32), (seed >> 32).to(tl.uint32)
    high = high ^ (_mix_triton(low) >> 1)
    low = low ^ _mix_triton(high + position.to(tl.uint32))
    high = high ^ (_mix_triton(low) >> 1)
    low = low ^ _mix_triton(high)
    key, factor = low, (high << 1) | 1
    bits = _mix_triton(token_ids.to(tl.uint32) * factor + key)
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)  # 2^-32, 1 - 2^-24
    # 1 - u rounds a small u away, so there the series of -log(1 - u) stands in.
    series = u * (1 + u * (0.5 + u * (0.33333334 + u * 0.25)))
    return -_log(tl.where(u < 0.0625, series, -_log(1 - u, COMPILED)), COMPILED)


# Rows that join begin anywhere: alignment would compile anew.
@triton.jit(do_not_specialize_on_alignment=["temperatures_ptr", "seeds_ptr"])
def _draw_slice_kernel(
    logits_ptr,
    temperatures_ptr,
    seeds_ptr,
    positions_ptr,
    lowest_ptr,
    first_ids_ptr,
    places_ptr,
    rows_ptr,
    masks_ptr,
    best_ptr,
    ids_ptr,
    vocabulary,
    row_stride,
    words,
    first_id,
    BLOCK: tl.constexpr,
    HAS_CUTOFF: tl.constexpr,
    HAS_LINES: tl.constexpr,
    HAS_MASKS: tl.constexpr,
    PICKED: tl.constexpr,
    COMPILED: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY)
    line, slice_id, slices = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    place, row = line, line
    if HAS_LINES:
        place, row = tl.load(places_ptr + line), tl.load(rows_ptr + line)
    column = slice_id * BLOCK + tl.arange(0, BLOCK)
    mask = column < vocabulary
    source = logits_ptr + (line if PICKED else place).to(tl.int64) * row_stride + column
    scores = tl.load(source, mask=mask, other=float("-inf")).to(tl.float32)
    if HAS_MASKS:
        word = tl.load(masks_ptr + line.to(tl.int64) * words + column // 32, mask=mask, other=0)
        scores = tl.where((word >> column % 32) & 1 != 0, scores, float("-inf"))
    if HAS_CUTOFF:
        lowest, first = tl.load(lowest_ptr + line), tl.load(first_ids_ptr + line)
        keep = (scores > lowest) | ((scores == lowest) & (first_id + column >= first))
        scores = tl.where(keep, scores, float("-inf"))
    temperature = tl.load(temperatures_ptr + row)
    if temperature > 0:
        seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + place)
        scores = scores * (1 / temperature) + _gumbel_noise_triton(seed, position, first_id + column, COMPILED)
    best = tl.max(scores, axis=0)
    # Plain reductions cost less than one over pairs of score and column. `best` is NaN only if all scores are.
    index = tl.min(tl.where(scores == best, column, vocabulary - 1), axis=0)
    has_nan = tl.max((scores != scores).to(tl.int32), axis=0)
    id = first_id + tl.where(best == best, index, slice_id * BLOCK)
    tl.store(best_ptr + line * slices + slice_id, tl.where(best == best, best, float("-inf")))
    tl.store(ids_ptr + line * slices + slice_id, tl.where(has_nan > 0, -1 - id, id))


@triton.jit
def _best_slice_kernel(
    best_ptr,
    ids_ptr,
    told_ptr,
    row_ids_ptr,
    places_ptr,
    slices,
    BLOCK: tl.constexpr,
    MARKS: tl.constexpr,
    HAS_PLACES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Store each row's best token, and its score; of lines with places the token alone, as draw_lines does."""
    wait_for_predecessor(EARLY)
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    best = tl.load(best_ptr + row * slices + i, mask=i < slices, other=float("-inf"))
    top, index = tl.max(best, axis=0, return_indices=True)
    ids = tl.load(ids_ptr + row * slices + i, mask=i < slices, other=0)
    top = tl.where(tl.min(ids, axis=0) < 0, float("inf"), top)
    id = tl.load(ids_ptr + row * slices + index)
    id = tl.where(id < 0, -1 - id, id)
    if MARKS:
        id = tl.where(tl.abs(top) < float("inf"), id, -1)
    if HAS_PLACES:
        row = tl.load(places_ptr + row)
        before = tl.load(row_ids_ptr + row)
        id = tl.where(before < 0, before, tl.where(top == float("-inf"), _NONE_LEFT, id))
    else:
        tl.store(told_ptr + row, top)
    tl.store(row_ids_ptr + row, id)
