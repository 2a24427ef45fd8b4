"""GroupMatrix: a matrix of few bits, whose groups of neighbouring inputs share a scale."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from nanoinfer.kernels.launch import launch_in_between
from nanoinfer.kernels.linear.in_parts import WeightInParts
from nanoinfer.weights.formats.groups.layout import Layout
from nanoinfer.weights.formats.groups.store import GroupStore
from nanoinfer.weights.formats.groups.tensors import shards_of
from nanoinfer.weights.formats.matrix import Matrix
from nanoinfer.weights.shards import Section, Shard, bias_shards, rows_and_outputs


class GroupMatrix(Matrix):
    """The weight as a store of groups."""

    def __init__(self, sections: list[Section], in_features: int, bias: bool, layout: Layout, label: str) -> None:
        """label: what messages call the format"""
        super().__init__()
        self.store, self.label = GroupStore(sections, in_features, layout, label), label
        rows = len(self.store.words)
        self.bias = nn.Parameter(torch.empty(rows), requires_grad=False) if bias else None
        self._dtype = torch.get_default_dtype()
        self._is_in_parts = False

    def operand(self) -> Tensor | WeightInParts:
        """Return the matrix in the model's dtype."""
        dense = self.store.dense(self._dtype)
        if self._is_in_parts:
            return WeightInParts(dense, rows_and_outputs(self.store.sections))
        launch_in_between(dense.device)
        return dense

    def fix_order(self, sizes: list[int]) -> None:
        """Let a GPU's products add up in one order: raises ValueError, for they cannot."""
        raise ValueError(f"deterministic=True: must be False with weights in {self.label}: no product has one order")

    def fix_parts(self) -> None:
        """Let the CPU multiply by parts, whose shapes do not depend on the number of ranks."""
        self._is_in_parts = True

    def finish(self) -> None:
        """Bring the inputs into their order, if groups have one."""
        self.store.finish()

    def shards(self) -> Iterator[Shard]:
        """Yield the shards of the store, and of the bias, if there is one."""
        yield from shards_of(self.store)
        if self.bias is not None:
            yield from bias_shards(self.bias, self.store.sections)
