"""GroupMatrix: a matrix of few bits, whose groups of neighbouring inputs share a scale."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn

from nanoinfer.kernels.groups import GroupWeight
from nanoinfer.kernels.launch import launch_in_between
from nanoinfer.kernels.linear.cpu import few_bits
from nanoinfer.kernels.linear.cpu.in_parts import WeightInParts
from nanoinfer.kernels.linear.cpu.packed import PackedWeight, packed_copy
from nanoinfer.kernels.linear.groups.dense import dequantize
from nanoinfer.kernels.linear.groups.linear import GroupLinearWeight
from nanoinfer.kernels.linear.in_order.weight import InOrderWeight
from nanoinfer.kernels.linear.operands.gathered import GatheredWeight
from nanoinfer.kernels.linear.operands.weight import Weight
from nanoinfer.weights.formats.groups.layout import Layout
from nanoinfer.weights.formats.groups.store import GroupStore
from nanoinfer.weights.formats.groups.tensors import shards_of
from nanoinfer.weights.formats.made import may_keep_bits
from nanoinfer.weights.formats.matrix import Matrix
from nanoinfer.weights.shards import Section, Shard, bias_shards, rows_and_outputs

W = TypeVar("W", bound=Weight)


class GroupMatrix(Matrix):
    """The weight as a store of groups."""

    def __init__(self, sections: list[Section], in_features: int, bias: bool, layout: Layout, label: str) -> None:
        """label: what messages call the format"""
        super().__init__(sections, in_features)
        self.store = GroupStore(sections, in_features, layout, label)
        rows = len(self.store.words)
        self.bias = nn.Parameter(torch.empty(rows), requires_grad=False) if bias else None
        self._dtype = torch.get_default_dtype()
        self.takes_lanes = self.store.order is None
        self._in_order: GatheredWeight | InOrderWeight | WeightInParts | None = None
        self._is_in_parts = False

    def operand(self) -> Tensor | Weight:
        """Return the store, or where no kernel reads it, the matrix in the model's dtype."""
        if self._in_order is not None:
            return self._in_order
        if not self._is_in_parts and self.store.keeps(self._dtype):  # parts have the same bits whatever memory there is
            return self.store.remember(self._for_cpu)
        weight = self.store.weight
        if self._is_in_parts:
            return self._in_parts(self._dense()) if weight is None else self._gathering(self._in_parts(weight))
        return self._dense() if weight is None else self._gathering(GroupLinearWeight(*weight))

    def look_up(self, rows: Tensor) -> Tensor:
        """Return rows in the model's dtype. rows: their numbers, of int32"""
        assert self.store.weight is not None
        return dequantize(self.store.weight, self._dtype, rows)

    def _for_cpu(self) -> Tensor | PackedWeight | few_bits.FewBitsWeight:
        numbers, weight = packed_copy(self.store.dense(self._dtype)), self.store.weight
        if self._dtype != torch.bfloat16 or not isinstance(numbers, PackedWeight):
            return numbers
        if weight is None or self.store.order is not None or not few_bits.fits(weight):
            return numbers
        keeps = may_keep_bits(numbers.shape, few_bits.bytes_of(weight))
        return few_bits.FewBitsWeight(weight, numbers) if keeps else numbers

    def _dense(self) -> Tensor:
        dense = self.store.dense(self._dtype)
        launch_in_between(dense.device)
        return dense

    def _in_parts(self, weight: Tensor | GroupWeight) -> WeightInParts:
        return WeightInParts(weight, rows_and_outputs(self.sections))

    def _gathering(self, weight: W) -> W | GatheredWeight:
        """Return a weight that puts its input into the order of the store, if that has one."""
        return weight if self.store.order is None else GatheredWeight(weight, self.store.order.columns)

    def fix_order(self, sizes: list[int]) -> None:
        """Let a GPU's products add up in one order; raises ValueError, and takes sizes, as InOrderWeight does."""
        weight = self.store.weight
        if weight is None:
            raise ValueError(
                f"deterministic=True: must be False with {self.store.label} whose groups are no neighbours here;"
                " device='cpu' takes all"
            )
        self._in_order = self._gathering(InOrderWeight(weight, self._dtype, self.bias is not None, sizes))

    def fix_parts(self) -> None:
        """Let the CPU multiply by parts, whose shapes do not depend on the number of ranks."""
        self._is_in_parts = True
        if self.store.order is None and self.store.weight is not None:
            self._in_order = self._in_parts(self.store.weight)  # views, which what is written later fills

    def finish(self) -> None:
        """Bring the inputs into their order, if groups have one."""
        self.store.finish()

    def shards(self) -> Iterator[Shard]:
        """Yield the shards of the store, and of the bias, if there is one."""
        yield from shards_of(self.store)
        if self.bias is not None:
            yield from bias_shards(self.bias, self.sections)
