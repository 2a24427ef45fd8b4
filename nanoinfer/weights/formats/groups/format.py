"""GroupFormat: matrices of four or eight bits, whose groups of neighbouring inputs share a scale."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from nanoinfer.kernels.groups import BITS
from nanoinfer.kernels.linear.groups.one_wave import BLOCK
from nanoinfer.weights.formats.experts import ExpertSizes, ExpertTensors, OutputShare
from nanoinfer.weights.formats.format import Format
from nanoinfer.weights.formats.groups.experts import GroupExperts
from nanoinfer.weights.formats.groups.layout import LARGE_GROUP, Layout
from nanoinfer.weights.formats.groups.matrix import GroupMatrix
from nanoinfer.weights.shards import Section


@dataclass(frozen=True)
class GroupFormat(Format):
    """The format of many tools' checkpoints, and of others that are quantized as they load.

    label: what messages call it
    layout: which tensors a checkpoint has for a matrix
    downs: those of experts' downs; None: the same
    has_biases: checkpoints have experts' biases in stacks, though not their matrices
    """

    label: str
    layout: Layout
    downs: Layout | None = None
    has_biases: bool = False

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.label

    @property
    def details(self) -> str:
        """The numbers, their groups, and which other tensors there are."""
        layout = self.layout
        groups = f"groups of {layout.group}" if layout.group else "one group"
        others = {"zeros": "zero points", "minima": "minima", "g_idx": "act order"}
        also = "".join(f" with {name}" for fills, name in others.items() if fills in layout.fills)
        return f"{layout.numbers} in {groups}{also}"

    def make_matrix(self, sections: list[Section], in_features: int, bias: bool) -> GroupMatrix:
        """Make the matrix."""
        return GroupMatrix(sections, in_features, bias, self.layout, self.label)

    def make_experts(
        self, tensors: ExpertTensors, sizes: ExpertSizes, output_share: OutputShare | None, biases: bool
    ) -> GroupExperts:
        """Make a layer's experts."""
        return GroupExperts(tensors, sizes, self.layout, self.label, output_share, biases, self.downs)

    def with_downs(self, other: Format) -> GroupFormat | None:
        """Return the format of experts whose downs have another one, also in groups."""
        if not isinstance(other, GroupFormat):
            return None
        return self if other == self else replace(self, downs=other.layout)

    @property
    def takes_expert_biases(self) -> bool:
        """Whether its checkpoints have stacks, as those with biases do, or matrices are rounded as they load."""
        return self.layout.stacked or self.has_biases or not self.layout.fields

    def inputs_together(self, size: int, ranks: int) -> int:
        """Return a group, if equal shares would cut it into smaller ones than kernels read, and each rank has one."""
        group = self.layout.group_of(size)
        piece = math.gcd(group, size // ranks) if size % ranks == 0 else 1
        is_read = piece == group or piece % BLOCK == 0 or "g_idx" in self.layout.fills  # act order is read by none
        return 1 if is_read or size % group or size < ranks * group else group

    def stores_parts(self, size: int, count: int) -> bool:
        """Return whether no part shares a group, or an integer, with the next one. In act order all inputs may."""
        layout = self.layout
        group = layout.group_of(size)
        steps = (step for field in layout.fields if not field.constant for step in field.steps(group))
        is_whole = all(size % step == 0 for step in (group, *steps))
        in_turn = "g_idx" not in layout.fills and not layout.stacked
        return in_turn and is_whole and group == layout.group_of(count * size)

    def weight_bytes(self, itemsize: int) -> float:
        """Return the bytes of a number, and its part of a scale and a zero."""
        layout = self.layout
        shared = scale = itemsize if layout.scales is None else layout.scales.itemsize
        shared += torch.uint8.itemsize if "zeros" in layout.fills else scale if "minima" in layout.fills else 0
        factors = (
            0.0
            if layout.block is None
            else torch.float16.itemsize * (layout.block.block or 1) / (layout.block.span or 1)
        )
        return BITS[layout.numbers] / 8 + factors + (0 if layout.group == 0 else shared / (layout.group or LARGE_GROUP))
