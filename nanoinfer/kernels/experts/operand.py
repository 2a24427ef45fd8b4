"""What the kernels know of a weight of experts, in whichever form it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from nanoinfer.kernels.fp8 import FP8, Fp8Weight
from nanoinfer.kernels.groups import BITS, GroupWeight, Numbers

ExpertWeights: TypeAlias = Tensor | Fp8Weight | GroupWeight  # one of these for each of the two products


@dataclass(frozen=True)
class Operand:
    """A weight's tensors, and what is fixed when a kernel is compiled; None: the form has no such thing.

    shape: experts, outputs and inputs
    data: the numbers, or words of them; scales, zeros, factors: as the weight's own
    bits: of a number
    block: the height and the width of FP8's blocks
    numbers, group: a GroupWeight's
    quads: those of four words in a row of a GroupWeight
    scales_are_exact: each number times its scale is one that the tokens' dtype has
    """

    shape: tuple[int, int, int]
    data: Tensor
    bits: int
    scales: Tensor | None = None
    zeros: Tensor | None = None
    factors: Tensor | None = None
    block: tuple[int | None, int | None] = (None, None)
    numbers: Numbers | None = None
    group: int | None = None
    quads: int | None = None
    scales_are_exact: bool = False

    @classmethod
    def of(cls, weight: ExpertWeights, dtype: torch.dtype) -> Operand:
        """Take a weight apart, whose tensors are contiguous; dtype: that of the tokens"""
        if isinstance(weight, GroupWeight):
            words = weight.words
            assert all(part is None or part.is_contiguous() for part in weight[:4])
            return cls(
                (len(words), words.shape[1], weight.in_features),
                words,
                BITS[weight.numbers],
                weight.scales,
                weight.zeros,
                weight.factors,
                numbers=weight.numbers,
                group=weight.group,
                quads=words.shape[2] // 4,
                scales_are_exact=_scales_are_exact(weight, dtype),
            )
        data, scales, block = (*weight, weight.block) if isinstance(weight, Fp8Weight) else (weight, None, (None, None))
        count, rows, columns = data.shape
        assert data.is_contiguous()
        return cls((count, rows, columns), data, 8 * data.itemsize, scales, block=block)

    @property
    def scales_are_paired(self) -> bool:
        """Return whether two scales of a row are one load; where they are exact, each has a byte."""
        return self.scales_are_exact and self.group is not None and self.shape[2] // self.group % 2 == 0

    def inputs_at_once(self, most: int) -> int:
        """Return how many inputs of a GroupWeight, at most, a program multiplies before it applies their scales."""
        assert self.group is not None
        if self.scales_are_exact or self.group == self.shape[2]:
            return most
        return min(most, max(self.group & -self.group, 128 // self.bits))


def _scales_are_exact(weight: GroupWeight, dtype: torch.dtype) -> bool:
    """Return whether dtype has each product of an e2m1, of two bits, and a scale; float16 lacks most powers of two."""
    in_range = weight.scales.dtype == FP8 or (weight.scales.dtype == torch.uint8 and dtype != torch.float16)
    return weight.numbers == "e2m1" and in_range and weight.group in (16, 32)
