"""PlainMatrix: a matrix of numbers of the model's dtype."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from nanoinfer.kernels.linear.cpu.in_parts import WeightInParts
from nanoinfer.kernels.linear.cpu.packed import PackedWeight, can_pack
from nanoinfer.kernels.linear.in_order.weight import InOrderWeight
from nanoinfer.weights.formats.matrix import Matrix
from nanoinfer.weights.shards import Section, Shard, bias_shards, rows_and_outputs, rows_of


class PlainMatrix(Matrix):
    """The weight as a parameter. On the CPU, once filled, mostly as a PackedWeight."""

    weight: Tensor | PackedWeight
    takes_lanes = True
    may_pack = True  # False: a model has no steps of few tokens, for which a packed weight is faster

    def __init__(self, sections: list[Section], in_features: int, bias: bool) -> None:
        super().__init__(sections, in_features)
        rows = sum(section.rows for section in sections)
        self.weight = nn.Parameter(torch.empty(rows, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(rows), requires_grad=False) if bias else None
        self._in_order: InOrderWeight | WeightInParts | None = None

    def operand(self) -> Tensor | PackedWeight | InOrderWeight | WeightInParts:
        """Return the weight, or what multiplies by it in a fixed order."""
        return self._in_order or self.weight

    def finish(self) -> None:
        """Let a filled weight give way to its packed form, where that is faster."""
        weight = self.weight
        if self.may_pack and self._in_order is None and isinstance(weight, Tensor) and can_pack(weight):
            del self.weight
            self.weight = PackedWeight(weight)

    def fix_order(self, sizes: list[int]) -> None:
        """Let a GPU's products add up in the order of the inputs; sizes: as for InOrderWeight"""
        assert isinstance(self.weight, Tensor)
        self._in_order = InOrderWeight(self.weight, self.weight.dtype, self.bias is not None, sizes)

    def fix_parts(self) -> None:
        """Let the CPU multiply by parts, whose shapes do not depend on the number of ranks."""
        assert isinstance(self.weight, Tensor)
        self._in_order = WeightInParts(self.weight, rows_and_outputs(self.sections))

    def shards(self) -> Iterator[Shard]:
        """Yield the shards of NAME.weight, and of NAME.bias if there is a bias, for each of the sections."""
        for section, rows in zip(self.sections, rows_of(self.sections), strict=True):
            yield Shard(f"{section.name}.weight", self.weight[rows], section.shape, section.start, section.dim)
        if self.bias is not None:
            yield from bias_shards(self.bias, self.sections)
