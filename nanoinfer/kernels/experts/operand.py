"""What the kernels know of experts' GroupWeights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from nanoinfer.kernels.fp8 import Fp8Weight, parts_of
from nanoinfer.kernels.groups import BITS, GroupWeight, scales_are_exact
from nanoinfer.kernels.linear.groups.linear import GroupLinearWeight

ExpertWeights: TypeAlias = Tensor | Fp8Weight | GroupWeight  # one of these for each of the two products


@dataclass(frozen=True)
class GroupOperand:
    """A weight of experts, [experts, rows, inputs], as the kernels take it.

    bits: of a number
    quads: those of four words in a row
    scales_are_exact: each number times its scale is one that the tokens' dtype has, and groups are of 16 or 32
    """

    weight: GroupWeight
    shape: tuple[int, int, int]
    bits: int
    quads: int
    scales_are_exact: bool

    @classmethod
    def of(cls, weight: GroupWeight, dtype: torch.dtype) -> GroupOperand:
        """Take a weight, whose tensors are contiguous. dtype: that of the tokens"""
        bits = BITS[weight.numbers]
        assert all(part is None or part.is_contiguous() for part in weight[:4])
        assert can_multiply_groups(weight)
        are_exact = weight.group in (16, 32) and scales_are_exact(weight, dtype)
        return cls(weight, shape_of(weight), bits, weight.words.shape[2] // 4, are_exact)

    @property
    def scales_are_paired(self) -> bool:
        """Return whether two scales of a row are one load; where they are exact, each has a byte."""
        return self.scales_are_exact and self.weight.scales.shape[2] % 2 == 0

    def inputs_at_once(self, most: int) -> int:
        """Return how many inputs, at most, a program multiplies before it applies their scales."""
        if self.scales_are_exact or self.weight.group == self.weight.in_features:
            return most
        return min(most, max(self.weight.group, 128 // self.bits))


def can_multiply_groups(weight: GroupWeight) -> bool:
    """Return whether the kernels can multiply by a weight: a group is a whole row, or a power of two from 16 on."""
    group = weight.group
    return group == weight.in_features or (group >= 16 and group & (group - 1) == 0)


def shape_of(weight: ExpertWeights) -> tuple[int, int, int]:
    """Return the experts, the rows and the inputs of a weight."""
    count, rows, columns = (weight.words if isinstance(weight, GroupWeight) else parts_of(weight)[0]).shape
    return count, rows, weight.in_features if isinstance(weight, GroupWeight) else columns


def group_linear(weights: GroupWeight, expert: int) -> GroupLinearWeight:
    """Return the weight of one expert, [rows, inputs], which multiplies itself."""
    return GroupLinearWeight(
        weights.words[expert],
        weights.scales[expert],
        None if weights.zeros is None else weights.zeros[expert],
        None if weights.factors is None else weights.factors[expert],
        weights.numbers,
        weights.in_features,
    )
