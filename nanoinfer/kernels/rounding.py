"""Rounds a matrix to numbers of few bits, whose groups of neighbouring inputs share a scale; needs no other data."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.groups import BITSANDBYTES, E2M1, MIDDLES, TABLES, Numbers, values_of
from nanoinfer.kernels.launch import cdiv, next_power_of_2

CANDIDATES = tl.constexpr(5)  # from 24/32 to 32/32 of the scale that reaches the largest value; one more is above it
SHARES = 3  # 10/10, 9/10 and 8/10 of a group's lowest value, and of its highest, where it has a zero
NUMBERS_PER_PROGRAM = 4096


class RoundedMatrix(NamedTuple):
    """A matrix in numbers of few bits.

    numbers: [rows, inputs] uint8, as `pack` takes them
    scales: [rows, inputs / group]
    zeros: [rows, inputs / group] uint8; None: half of what numbers count to
    """

    numbers: Tensor
    scales: Tensor
    zeros: Tensor | None


def round_to_groups(
    values: Tensor, group: int, numbers: Numbers, dtype: torch.dtype, has_zeros: bool = False
) -> RoundedMatrix:
    """Compute round_to_groups_reference, by a kernel where there is one."""
    compute = round_to_groups_triton if values.is_cuda and numbers not in TABLES else round_to_groups_reference
    return compute(values, group, numbers, dtype, has_zeros)


def round_to_groups_reference(
    values: Tensor, group: int, numbers: Numbers, dtype: torch.dtype, has_zeros: bool = False
) -> RoundedMatrix:
    """Round a matrix.

    Of each group's candidates, that scale is taken whose products with its numbers have the least squared error.

    values: [rows, inputs], finite; inputs: a multiple of the group
    dtype: the scales'; uint8: they are powers of two, with 127 added
    has_zeros: integers count from a zero that each group has of its own
    """
    grouped = values.float().unflatten(-1, (-1, group))
    if dtype == torch.uint8:
        candidates = _powers(grouped)
    elif numbers in BITSANDBYTES:
        candidates = _largest(grouped, dtype)
    else:
        candidates = _fitted(grouped, numbers, dtype, has_zeros)
    best: tuple[Tensor, ...] = ()
    for stored, scales, zeros in candidates:
        found = nearest(grouped / scales, numbers, zeros)
        errors = values_of(found, numbers, zeros).mul_(scales).sub_(grouped).square_().sum(-1, keepdim=True)
        new = found, stored, zeros, errors
        best = (
            tuple(torch.where(errors < best[3], mine, old) for mine, old in zip(new, best, strict=True))
            if best
            else new
        )
    found, stored, zeros, _ = best
    return RoundedMatrix(
        found.flatten(-2), stored.squeeze(-1), zeros.squeeze(-1).to(torch.uint8) if has_zeros else None
    )


def nearest(values: Tensor, numbers: Numbers, zeros: Tensor | int | None = None) -> Tensor:
    """Return the numbers that are nearest to some values, uint8 as `pack` takes them; ties go to even ones.

    Those of nf4 and fp4 go to lower ones, as bitsandbytes has it.
    zeros: of integers, as for values_of
    """
    if numbers in BITSANDBYTES:
        table, codes = torch.tensor(TABLES[numbers], device=values.device).sort()
        return codes.to(torch.uint8)[torch.bucketize(values.contiguous(), (table[1:] + table[:-1]) / 2)]
    if numbers != "e2m1":
        zeros = MIDDLES[numbers] if zeros is None else zeros
        return values.round().add_(zeros).clamp_(0, 2 * MIDDLES[numbers] - 1).to(torch.uint8)
    sizes = values.abs()
    magnitudes = torch.zeros_like(values, dtype=torch.uint8)
    for code, (low, high) in enumerate(pairwise(E2M1)):
        middle = (low + high) / 2
        magnitudes += sizes > middle if code % 2 == 0 else sizes >= middle
    return magnitudes | torch.signbit(values).to(torch.uint8) << 3


Candidate = tuple[Tensor, Tensor, Tensor]  # scales as they are stored and as float32, and zeros, [rows, groups, 1] each


def _fitted(grouped: Tensor, numbers: Numbers, dtype: torch.dtype, has_zeros: bool) -> Iterator[Candidate]:
    """Yield candidates, whose scales are fitted to their numbers by least squares."""
    for scales, zeros in _between_ends(grouped, numbers) if has_zeros else _about_the_middle(grouped, numbers):
        found = values_of(nearest(grouped / scales, numbers, zeros), numbers, zeros)
        fitted = (grouped * found).sum(-1, keepdim=True) / found.square().sum(-1, keepdim=True).clamp_(min=1)
        stored = _not_zero(fitted).to(dtype)
        yield stored, _not_zero(stored.float()), zeros


def _about_the_middle(grouped: Tensor, numbers: Numbers) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield scales and zeros that are the middle of what numbers count to.

    The largest value of a group takes the end of the range that is the longer one, so that a scale may be negative.
    """
    half = MIDDLES[numbers]
    at = grouped.abs().argmax(-1, keepdim=True)
    reach = grouped.gather(-1, at) / -half
    grid = ((24 + 2 * step) / 32 for step in range(CANDIDATES.value))
    for share in (*grid, half / (half - 1)):  # the last: of numbers that were rounded to a range of equal ends
        yield _not_zero(reach * share), torch.full_like(reach, half)


def _between_ends(grouped: Tensor, numbers: Numbers) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield scales and zeros that let the numbers reach from about the lowest value, or 0, to about the highest."""
    top = 2 * MIDDLES[numbers] - 1
    low, high = grouped.amin(-1, keepdim=True).clamp_(max=0), grouped.amax(-1, keepdim=True).clamp_(min=0)
    shares = [(10 - step) / 10 for step in range(SHARES)]
    for below, above in product(shares, shares):
        scales = _not_zero((high * above - low * below) / top)
        yield scales, (low * -below / scales).round_().clamp_(0, top)


def _powers(grouped: Tensor) -> Iterator[Candidate]:
    """Yield powers of two as _fitted does: the one that has the largest number's exponent in common with the largest
    value, as OCP MX (2023) takes, and the next one. What is not finite gets the NaN of such scales."""
    largest = grouped.abs().amax(-1, keepdim=True)
    exponents = torch.frexp(largest).exponent - 1 - 2  # frexp's mantissas are below 1; 6 has the exponent 2
    for more in (0, 1):
        stored = (exponents + more + 127).clamp_(0, 254)
        yield (
            torch.where(largest.isfinite(), stored, 255).to(torch.uint8),
            torch.ldexp(torch.ones_like(largest), stored - 127),
            torch.zeros_like(largest),
        )


def _largest(grouped: Tensor, dtype: torch.dtype) -> Iterator[Candidate]:
    """Yield the scale that bitsandbytes takes: the largest value."""
    stored = grouped.abs().amax(-1, keepdim=True).to(dtype)
    yield stored, _not_zero(stored.float()), torch.zeros_like(stored)


def _not_zero(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 1.0, scales)


def round_to_groups_triton(
    values: Tensor, group: int, numbers: Numbers, dtype: torch.dtype, has_zeros: bool = False
) -> RoundedMatrix:
    """round_to_groups_reference as one launch, of integers."""
    assert values.is_contiguous()
    rows, inputs = values.shape
    groups = inputs // group
    found = torch.empty((rows, inputs), dtype=torch.uint8, device=values.device)
    scales = torch.empty((rows, groups), dtype=dtype, device=values.device)
    zeros = torch.empty((rows, groups), dtype=torch.uint8, device=values.device) if has_zeros else None
    block_k = next_power_of_2(group)
    block_g = max(NUMBERS_PER_PROGRAM // block_k, 1)
    grid = (cdiv(rows * groups, block_g),)
    half = MIDDLES[numbers]
    _round_kernel[grid](
        values, found, scales, zeros, rows * groups, group, HALF=half, ENDS=SHARES, BLOCK_G=block_g,
        BLOCK_K=block_k, enable_fp_fusion=True,
    )  # fmt: skip
    return RoundedMatrix(found, scales, zeros)


@triton.jit(do_not_specialize=["groups"])
def _round_kernel(
    values_ptr,
    numbers_ptr,
    scales_ptr,
    zeros_ptr,
    groups,
    group,
    HALF: tl.constexpr,
    ENDS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    HAS_ZEROS: tl.constexpr = zeros_ptr is not None
    COUNT: tl.constexpr = ENDS * ENDS if HAS_ZEROS else CANDIDATES + 1
    g, k = tl.program_id(0).to(tl.int64) * BLOCK_G + tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_K)
    mask = (g < groups)[:, None] & (k < group)[None, :]
    places = g[:, None] * group + k[None, :]
    values = tl.load(values_ptr + places, mask=mask, other=0.0).to(tl.float32)
    low, high = tl.min(values, axis=1), tl.max(values, axis=1)
    best, least = tl.zeros([BLOCK_G, BLOCK_K], tl.float32), tl.zeros([BLOCK_G], tl.float32)
    taken, zero = tl.zeros([BLOCK_G], scales_ptr.dtype.element_ty), tl.zeros([BLOCK_G], tl.float32)
    for step in range(COUNT):
        candidate, zeros = _candidate_block(low, high, step, HALF, ENDS, HAS_ZEROS)
        found = _nearest_block(values, candidate, zeros, HALF)
        squares = tl.maximum(tl.sum(found * found, axis=1), 1.0)
        stored = _not_zero_block(tl.div_rn(tl.sum(values * found, axis=1), squares)).to(taken.dtype)
        scales = _not_zero_block(stored.to(tl.float32))
        found = _nearest_block(values, scales, zeros, HALF)
        errors = found * scales[:, None] - values
        error = tl.sum(errors * errors, axis=1)
        found += zeros[:, None]
        is_better = (error < least) | (step == 0)
        best, least = tl.where(is_better[:, None], found, best), tl.where(is_better, error, least)
        taken, zero = tl.where(is_better, stored, taken), tl.where(is_better, zeros, zero)
    tl.store(numbers_ptr + places, best.to(tl.uint8), mask=mask)
    tl.store(scales_ptr + g, taken, mask=g < groups)
    if HAS_ZEROS:
        tl.store(zeros_ptr + g, zero.to(tl.uint8), mask=g < groups)


@triton.jit
def _candidate_block(low, high, step, HALF: tl.constexpr, ENDS: tl.constexpr, HAS_ZEROS: tl.constexpr):
    """Return what a candidate begins with, scales and zeros, [groups] float32 each.

    low, high: of the groups' values
    """
    if HAS_ZEROS:
        low = tl.minimum(low, 0.0) * (1 - 0.1 * (step // ENDS))  # a division would be less exact
        high = tl.maximum(high, 0.0) * (1 - 0.1 * (step % ENDS))
        scales = _not_zero_block(tl.div_rn(high - low, tl.full(low.shape, 2.0 * HALF - 1, tl.float32)))
        return scales, tl.clamp(_round(tl.div_rn(-low, scales)), 0.0, 2.0 * HALF - 1)
    else:
        reach = tl.where(high >= -low, high, low) * (-1.0 / HALF)
        scales = _not_zero_block(reach * tl.where(step < CANDIDATES, (24 + 2 * step) * 0.03125, HALF / (HALF - 1)))
        return scales, tl.full(low.shape, HALF, tl.float32)


@triton.jit
def _nearest_block(values, scales, zeros, HALF: tl.constexpr):
    """Return the integers from -zeros on, in float32, that are nearest to values / scales; ties go to even ones."""
    ratios = tl.div_rn(values, tl.broadcast_to(scales[:, None], values.shape))
    first = -zeros[:, None]
    return _round(tl.minimum(tl.maximum(ratios, first), first + (2.0 * HALF - 1)))


@triton.jit
def _round(values):
    """Return the nearest integers of float32s below 2^22; ties go to even ones."""
    return (values + 12582912.0) - 12582912.0  # 1.5 * 2^23: a sum with it has no room for fractions


@triton.jit
def _not_zero_block(scales):
    return tl.where(scales == 0, 1.0, scales)
