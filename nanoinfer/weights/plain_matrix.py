"""PlainMatrix: the format of most checkpoints, a matrix of numbers of the model's dtype.

A format is one class. It says which tensors of a checkpoint it stores, how a rank slices them, and how a product uses
them. The linear layers only tell it which rows and columns of which projections this rank holds.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from nanoinfer.kernels.linear.activation import Activation
from nanoinfer.kernels.linear.dispatch import linear, norm_linear
from nanoinfer.kernels.linear.in_order import InOrderWeight
from nanoinfer.kernels.linear.in_parts import WeightInParts
from nanoinfer.kernels.linear.packed import PackedWeight, can_pack
from nanoinfer.kernels.norm.rms_norm import Norm
from nanoinfer.kernels.ranks.send_receive import VectorLane
from nanoinfer.weights.shards import Section, Shard, bias_shards, rows_and_outputs


class PlainMatrix(nn.Module):
    """A weight, [out_features, in_features], and if wanted a bias, [out_features]. sections: in their rows' order"""

    weight: Tensor | PackedWeight
    bias: Tensor | None

    def __init__(self, sections: list[Section], in_features: int, bias: bool) -> None:
        super().__init__()
        self.sections = sections
        rows = sum(section.rows for section in sections)
        self.weight = nn.Parameter(torch.empty(rows, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(rows), requires_grad=False) if bias else None
        self._in_order: InOrderWeight | WeightInParts | None = None

    def can_apply_activation(self, tokens: int) -> bool:
        """Return False: no launch before the product changes its input."""
        return False

    def product(
        self,
        x: Tensor,
        activation: Activation | None = None,
        may_split: bool = False,
        with_bias: bool = True,
        before: Activation | None = None,
    ) -> Tensor:
        """Multiply, as kernels.linear.dispatch.linear does. with_bias: False if another rank adds the bias"""
        return linear(x, self._in_order or self.weight, self.bias if with_bias else None, activation, may_split, before)

    def norm_product(
        self,
        x: Tensor,
        residual: Tensor | None,
        pre: Norm | None,
        post: Norm | None,
        activation: Activation | None,
        lane: VectorLane | None,
    ) -> tuple[Tensor, Tensor]:
        """Add, normalise and multiply, as kernels.linear.dispatch.norm_linear does."""
        return norm_linear(x, residual, pre, self._in_order or self.weight, self.bias, activation, post, lane)

    def pack(self) -> None:
        """Let a filled weight give way to its packed form, where that is faster."""
        weight = self.weight
        if self._in_order is None and isinstance(weight, Tensor) and can_pack(weight):
            del self.weight
            self.weight = PackedWeight(weight)

    def fix_order(self, sizes: list[int]) -> None:
        """Let a GPU's products add up in the order of the inputs; sizes: as for InOrderWeight"""
        assert isinstance(self.weight, Tensor)
        self._in_order = InOrderWeight(self.weight, self.bias is not None, sizes)

    def fix_parts(self) -> None:
        """Let the CPU multiply by parts, whose shapes do not depend on the number of ranks."""
        assert isinstance(self.weight, Tensor)
        self._in_order = WeightInParts(self.weight, rows_and_outputs(self.sections))

    def shards(self) -> Iterator[Shard]:
        """Yield the shards of NAME.weight, and of NAME.bias if there is a bias, for each of the sections."""
        first = 0
        for section in self.sections:
            rows = self.weight[first : first + section.rows]
            first += section.rows
            yield Shard(f"{section.name}.weight", rows, section.shape, section.start, section.dim)
        if self.bias is not None:
            yield from bias_shards(self.bias, self.sections)


def pack_weights(model: nn.Module) -> None:
    """Pack the matrices of a model whose weights are filled; on a GPU none gains by it."""
    for module in model.modules():
        if isinstance(module, PlainMatrix):
            module.pack()
