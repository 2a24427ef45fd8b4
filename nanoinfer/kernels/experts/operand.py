"""What the kernels know of experts' GroupWeights."""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor

from nanoinfer.kernels.fp8 import Fp8Weight, parts_of
from nanoinfer.kernels.groups import GroupWeight
from nanoinfer.kernels.linear.groups.linear import GroupLinearWeight

ExpertWeights: TypeAlias = Tensor | Fp8Weight | GroupWeight  # one of these for each of the two products


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
    return GroupLinearWeight(*weights.map(lambda part: part[expert]))
