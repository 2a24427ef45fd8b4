"""Layout: how a checkpoint stores the matrices of one format of groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanoinfer.kernels.groups import Numbers
from nanoinfer.weights.formats.groups.fields import OF_GROUPS, Field, Fills

LARGE_GROUP, GROUP = 128, 64  # of matrices that are rounded here


@dataclass(frozen=True)
class Layout:
    """Which tensors a checkpoint has for a matrix, and what their numbers are.

    numbers: as for GroupWeight
    fields: the tensors; none: the checkpoint has plain matrices, which are rounded as they load
    group: how many inputs share a scale; 0: all; None: LARGE_GROUP, or GROUP where that does not divide the inputs
    scales: their dtype; None: the model's
    zeros: plain matrices are rounded to groups with zero points
    stacked: only experts are stored so: each tensor has all of a layer, and its name is a stack's with a field's behind
    """

    numbers: Numbers
    fields: tuple[Field, ...] = ()
    group: int | None = None
    scales: torch.dtype | None = None
    zeros: bool = False
    stacked: bool = False

    @property
    def fills(self) -> frozenset[Fills]:
        """What of a weight the checkpoint's tensors fill, or what is rounded."""
        stored: set[Fills] = {field.fills for field in self.fields if not field.constant}
        return frozenset(stored | {"zeros"} if self.zeros else stored)

    @property
    def rounds(self) -> bool:
        """Whether plain matrices can be rounded to such weights: to groups of neighbours, of one scale."""
        return self.fills <= {"numbers", "blocks", *OF_GROUPS} and all(field.name != "weight" for field in self.fields)

    @property
    def block(self) -> Field | None:
        """The tensor of blocks' factors."""
        return next((field for field in self.fields if field.fills == "blocks"), None)

    def group_of(self, inputs: int) -> int:
        """Return how many of a matrix's inputs share a scale; the last of its groups may have fewer."""
        if self.group is None:
            return LARGE_GROUP if inputs % LARGE_GROUP == 0 else min(GROUP, inputs)
        return min(self.group, inputs) if self.group else inputs
