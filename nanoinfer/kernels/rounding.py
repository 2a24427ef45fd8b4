"""Rounds a matrix to numbers of few bits, whose groups of neighbouring inputs share a scale; needs no other data."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.groups import BITS, E2M1, Numbers, values_of
from nanoinfer.kernels.launch import cdiv, next_power_of_2

CANDIDATES = tl.constexpr(5)  # from 24/32 to 32/32 of the scale that reaches the largest value; one more is above it
NUMBERS_PER_PROGRAM = 4096


def round_to_groups(values: Tensor, group: int, numbers: Numbers, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute round_to_groups_reference, by a kernel where there is one."""
    if values.is_cuda and numbers != "e2m1":
        return round_to_groups_triton(values, group, numbers, dtype)
    return round_to_groups_reference(values, group, numbers, dtype)


def round_to_groups_reference(
    values: Tensor, group: int, numbers: Numbers, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the numbers, [rows, inputs] uint8 as `pack` takes them, and the scales, [rows, inputs / group].

    Of each group's candidates, that scale is taken whose products with its numbers have the least squared error.

    values: [rows, inputs], finite; inputs: a multiple of the group
    dtype: the scales'; uint8: they are powers of two, with 127 added
    """
    grouped = values.float().unflatten(-1, (-1, group))
    candidates = _powers(grouped) if dtype == torch.uint8 else _fitted(grouped, numbers, dtype)
    best: tuple[Tensor, ...] = ()
    for stored, scales in candidates:
        found = nearest(grouped / scales, numbers)
        errors = values_of(found, numbers).mul_(scales).sub_(grouped).square_().sum(-1, keepdim=True)
        new = found, stored, errors
        best = (
            tuple(torch.where(errors < best[2], mine, old) for mine, old in zip(new, best, strict=True))
            if best
            else new
        )
    return best[0].flatten(-2), best[1].squeeze(-1)


def nearest(values: Tensor, numbers: Numbers) -> Tensor:
    """Return the numbers that are nearest to some values, uint8 as `pack` takes them; ties go to even ones."""
    if numbers != "e2m1":
        half = 1 << BITS[numbers] - 1
        return values.round().clamp_(-half, half - 1).add_(half).to(torch.uint8)
    sizes = values.abs()
    magnitudes = torch.zeros_like(values, dtype=torch.uint8)
    for code, (low, high) in enumerate(pairwise(E2M1)):
        middle = (low + high) / 2
        magnitudes += sizes > middle if code % 2 == 0 else sizes >= middle
    return magnitudes | torch.signbit(values).to(torch.uint8) << 3


def _fitted(grouped: Tensor, numbers: Numbers, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield scales as they are stored and as float32, [rows, groups, 1]: each candidate, fitted by least squares.

    The largest value of a group takes the end of the range that is the longer one, so that a scale may be negative.
    """
    half = 1 << BITS[numbers] - 1
    at = grouped.abs().argmax(-1, keepdim=True)
    reach = grouped.gather(-1, at) / -half
    grid = ((24 + 2 * step) / 32 for step in range(CANDIDATES.value))
    for share in (*grid, half / (half - 1)):  # the last: of numbers that were rounded to a range of equal ends
        scales = _not_zero(reach * share)
        found = values_of(nearest(grouped / scales, numbers), numbers)
        fitted = (grouped * found).sum(-1, keepdim=True) / found.square().sum(-1, keepdim=True).clamp_(min=1)
        stored = _not_zero(fitted).to(dtype)
        yield stored, _not_zero(stored.float())


def _powers(grouped: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield powers of two as _fitted does: the one that has the largest number's exponent in common with the largest
    value, as OCP MX (2023) takes, and the next one. What is not finite gets the NaN of such scales."""
    largest = grouped.abs().amax(-1, keepdim=True)
    exponents = torch.frexp(largest).exponent - 1 - 2  # frexp's mantissas are below 1; 6 has the exponent 2
    for more in (0, 1):
        stored = (exponents + more + 127).clamp_(0, 254)
        yield (
            torch.where(largest.isfinite(), stored, 255).to(torch.uint8),
            torch.ldexp(torch.ones_like(largest), stored - 127),
        )


def _not_zero(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 1.0, scales)


def round_to_groups_triton(values: Tensor, group: int, numbers: Numbers, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """round_to_groups_reference as one launch, of integers."""
    assert values.is_contiguous()
    rows, inputs = values.shape
    groups = inputs // group
    found = torch.empty((rows, inputs), dtype=torch.uint8, device=values.device)
    scales = torch.empty((rows, groups), dtype=dtype, device=values.device)
    block_k = next_power_of_2(group)
    block_g = max(NUMBERS_PER_PROGRAM // block_k, 1)
    grid = (cdiv(rows * groups, block_g),)
    half = 1 << BITS[numbers] - 1
    _round_kernel[grid](
        values, found, scales, rows * groups, group, HALF=half, BLOCK_G=block_g, BLOCK_K=block_k, enable_fp_fusion=True
    )
    return found, scales


@triton.jit(do_not_specialize=["groups"])
def _round_kernel(
    values_ptr, numbers_ptr, scales_ptr, groups, group, HALF: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr
):
    g, k = tl.program_id(0).to(tl.int64) * BLOCK_G + tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_K)
    mask = (g < groups)[:, None] & (k < group)[None, :]
    places = g[:, None] * group + k[None, :]
    values = tl.load(values_ptr + places, mask=mask, other=0.0).to(tl.float32)
    low, high = tl.min(values, axis=1), tl.max(values, axis=1)
    reach = tl.where(high >= -low, high, low) * (-1.0 / HALF)
    best, least = tl.zeros([BLOCK_G, BLOCK_K], tl.float32), tl.zeros([BLOCK_G], tl.float32)
    taken = tl.zeros([BLOCK_G], scales_ptr.dtype.element_ty)
    for step in tl.static_range(CANDIDATES + 1):
        candidate = reach * ((24 + 2 * step) / 32 if step < CANDIDATES else HALF / (HALF - 1))
        found = _nearest_block(values, _not_zero_block(candidate), HALF)
        squares = tl.maximum(tl.sum(found * found, axis=1), 1.0)
        stored = _not_zero_block(tl.div_rn(tl.sum(values * found, axis=1), squares)).to(taken.dtype)
        scales = _not_zero_block(stored.to(tl.float32))
        found = _nearest_block(values, scales, HALF)
        errors = found * scales[:, None] - values
        error = tl.sum(errors * errors, axis=1)
        if step == 0:
            best, least, taken = found, error, stored
        else:
            is_better = error < least
            best, least = tl.where(is_better[:, None], found, best), tl.where(is_better, error, least)
            taken = tl.where(is_better, stored, taken)
    tl.store(numbers_ptr + places, (best + HALF).to(tl.uint8), mask=mask)
    tl.store(scales_ptr + g, taken, mask=g < groups)


@triton.jit
def _nearest_block(values, scales, HALF: tl.constexpr):
    """Return the integers from -HALF on, in float32, that are nearest to values / scales; ties go to even ones."""
    ratios = tl.clamp(tl.div_rn(values, tl.broadcast_to(scales[:, None], values.shape)), -HALF, HALF - 1.0)
    return (ratios + 12582912.0) - 12582912.0  # 1.5 * 2^23: a sum with it has no room for fractions


@triton.jit
def _not_zero_block(scales):
    return tl.where(scales == 0, 1.0, scales)
