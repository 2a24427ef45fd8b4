"""Fp8Experts: the experts of a layer in FP8."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from nanoinfer.kernels.adapters.experts import ExpertAdapters
from nanoinfer.kernels.experts.in_order import check_order
from nanoinfer.kernels.experts.products import expert_mlps
from nanoinfer.kernels.experts.route import Routes
from nanoinfer.kernels.fp8 import Fp8Weight
from nanoinfer.kernels.linear.activation import AnyActivation
from nanoinfer.kernels.linear.cpu.in_parts import WeightInParts
from nanoinfer.kernels.linear.fp8.linear import can_multiply_fp8
from nanoinfer.kernels.linear.in_order.order import WeightShape
from nanoinfer.kernels.linear.in_order.weight import check_multiplies
from nanoinfer.weights.formats.expert_shards import expert_sections, stack_shards
from nanoinfer.weights.formats.experts import Experts, ExpertSizes, ExpertTensors, OutputShare
from nanoinfer.weights.formats.fp8.layout import Fp8Layout
from nanoinfer.weights.formats.fp8.store import Fp8Store
from nanoinfer.weights.shards import Shard, rows_and_outputs

Weights: TypeAlias = Tensor | Fp8Weight | list[WeightInParts]  # of all experts, for one of the two products


class Fp8Experts(Experts):
    """Each store has one expert's rows after the other's."""

    def __init__(
        self, tensors: ExpertTensors, sizes: ExpertSizes, layout: Fp8Layout, output_share: OutputShare | None = None
    ) -> None:
        """output_share: as for Format.make_experts"""
        super().__init__(tensors, sizes, output_share)
        above, downs, columns = expert_sections(tensors, sizes, output_share)
        self.gate_up = Fp8Store(above, sizes.hidden_size, layout)
        self.down = Fp8Store(downs, columns, layout)
        self._dtype = torch.get_default_dtype()
        self._in_order = False
        self._is_in_parts = False

    def forward(
        self,
        x: Tensor,
        routes: Routes,
        activation: AnyActivation,
        may_split: bool = False,
        adapters: ExpertAdapters | None = None,
    ) -> Tensor:
        """Multiply, as kernels.experts.products.expert_mlps does."""
        gate_up, down = self._weights()
        gather = None if self.output_share is None else self.output_share.gather
        how = may_split, self._in_order, gather
        return expert_mlps(x, routes, gate_up, down, activation, *how, adapters=adapters, count=self.skipped_from)

    def fix_order(self, used: int, activation: AnyActivation) -> None:
        """Let a GPU's products add up in one order; raises ValueError as check_multiplies and check_order do.

        used: experts that a token takes
        """
        gate_up, down = self._in_fp8()
        for weight in (gate_up, down):
            check_multiplies(self._dtype, weight)
        device = gate_up.numbers.device
        check_order(WeightShape.like(gate_up), WeightShape.like(down), used, activation, self._dtype, device)
        self._in_order = True

    def fix_parts(self) -> None:
        """Let the CPU multiply by parts, whose shapes do not depend on the number of ranks."""
        self._is_in_parts = True

    def _weights(self) -> tuple[Weights, Weights]:
        """Return what the products read: the stores, or where they cannot, the model's dtype, which the CPU keeps."""
        if self.gate_up.weight.is_cuda:
            gate_up, down = self._in_fp8()
            if can_multiply_fp8(self._dtype, gate_up) and can_multiply_fp8(self._dtype, down):
                return gate_up, down
            return self._dense(self.gate_up), self._dense(self.down)
        kept = [store.remember(partial(self._for_cpu, store)) for store in (self.gate_up, self.down)]
        return kept[0], kept[1]

    def _in_fp8(self) -> tuple[Fp8Weight, Fp8Weight]:
        """Return the stores' numbers and scales, expert by expert."""
        gate_up, down = (
            Fp8Weight(*(part.unflatten(0, (self.sizes.held, -1)) for part in (store.weight, store.scales)))
            for store in (self.gate_up, self.down)
        )
        return gate_up, down

    def _dense(self, store: Fp8Store) -> Tensor:
        return store.dense(self._dtype).unflatten(0, (self.sizes.held, -1))

    def _for_cpu(self, store: Fp8Store) -> Tensor | list[WeightInParts]:
        dense = self._dense(store)
        if not self._is_in_parts:
            return dense
        first = store.sections[: len(store.sections) // len(dense)]  # the other experts are cut alike
        return [WeightInParts(weight, rows_and_outputs(first)) for weight in dense]

    def shards(self) -> Iterator[Shard]:
        """Yield the shards of the stacked tensors that a checkpoint may have; the stores yield the others."""
        dim = 1 if self.output_share is None else 0
        yield from stack_shards(self.tensors, self.sizes, self.gate_up.parts, self.down.parts, dim)
