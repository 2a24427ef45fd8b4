"""Rounds a matrix to numbers of few bits, whose groups of neighbouring inputs share a scale. It needs no data."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from nanoinfer.kernels.groups import BITS, E2M1, Numbers

GRID = tuple(step / 32 for step in range(24, 34, 2))  # candidates: shares of the scale that reaches the largest value


def round_to_groups(values: Tensor, group: int, numbers: Numbers, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
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


def values_of(numbers: Tensor, kind: Numbers) -> Tensor:
    """Return what numbers stand for, as float32, if their scale is 1 and their zero the middle."""
    if kind != "e2m1":
        return numbers.float() - (1 << BITS[kind] - 1)
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=numbers.device)
    return table[numbers.int()]


def _fitted(grouped: Tensor, numbers: Numbers, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield scales as they are stored and as float32, [rows, groups, 1]: each candidate, fitted by least squares.

    The largest value of a group takes the end of the range that is the longer one, so that a scale may be negative.
    """
    half = 1 << BITS[numbers] - 1
    at = grouped.abs().argmax(-1, keepdim=True)
    reach = grouped.gather(-1, at) / -half
    for share in (*GRID, half / (half - 1)):  # the last: of numbers that were rounded to a range of equal ends
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
