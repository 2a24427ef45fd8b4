"""Fp8Matrix: the format of FP8 checkpoints, and of others that are quantized as they load."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from nanoinfer.kernels.launch import launch_in_between
from nanoinfer.kernels.linear.cpu.in_parts import WeightInParts
from nanoinfer.kernels.linear.cpu.packed import PackedWeight, packed_copy
from nanoinfer.kernels.linear.fp8.linear import Fp8LinearWeight, can_multiply_fp8
from nanoinfer.kernels.linear.in_order.weight import InOrderWeight
from nanoinfer.weights.formats.fp8.layout import Fp8Layout
from nanoinfer.weights.formats.fp8.store import Fp8Store
from nanoinfer.weights.formats.matrix import Matrix
from nanoinfer.weights.shards import Section, Shard, bias_shards, rows_and_outputs


class Fp8Matrix(Matrix):
    """The weight as a store of blocks."""

    takes_lanes = True

    def __init__(self, sections: list[Section], in_features: int, bias: bool, layout: Fp8Layout) -> None:
        super().__init__(sections, in_features)
        self.store = Fp8Store(sections, in_features, layout)
        rows = len(self.store.weight)
        self.bias = nn.Parameter(torch.empty(rows), requires_grad=False) if bias else None
        self._dtype = torch.get_default_dtype()
        self._in_order: InOrderWeight | None = None
        self._is_in_parts = False

    def can_apply_activation(self, tokens: int) -> bool:
        """Return whether the launch that rounds so many tokens to FP8 can apply an activation to them, too."""
        return self._in_order is None and tokens > 1 and can_multiply_fp8(self._dtype, self._in_fp8)

    def fix_order(self, sizes: list[int]) -> None:
        """Let a GPU's products add up in one order; raises ValueError, and takes sizes, as InOrderWeight does."""
        self._in_order = InOrderWeight(self._in_fp8, self._dtype, self.bias is not None, sizes)

    def fix_parts(self) -> None:
        """Let the CPU multiply by parts, whose shapes do not depend on the number of ranks."""
        self._is_in_parts = True

    def operand(self) -> Tensor | PackedWeight | WeightInParts | Fp8LinearWeight | InOrderWeight:
        """Return the store, or where no product reads it, the model's dtype, which the CPU keeps."""
        if self._in_order is not None:
            return self._in_order
        if self.store.weight.is_cuda:
            weight = self._in_fp8
            if can_multiply_fp8(self._dtype, weight):
                return weight
            dense = self.store.dense(self._dtype)
            launch_in_between(dense.device)
            return dense
        return self.store.remember(self._for_cpu)

    @property
    def _in_fp8(self) -> Fp8LinearWeight:
        return Fp8LinearWeight(self.store.weight, self.store.scales)

    def _for_cpu(self) -> Tensor | PackedWeight | WeightInParts:
        dense = self.store.dense(self._dtype)
        if self._is_in_parts:
            return WeightInParts(dense, rows_and_outputs(self.sections))
        return packed_copy(dense)

    def shards(self) -> Iterator[Shard]:
        """Yield the shards of the bias, if there is one; the store yields the others."""
        if self.bias is not None:
            yield from bias_shards(self.bias, self.sections)
