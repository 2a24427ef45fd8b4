"""GroupExperts: the experts of a layer in few bits, whose groups of neighbouring inputs share a scale."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from nanoinfer.kernels.adapters.experts import ExpertAdapters
from nanoinfer.kernels.experts.in_order import check_order
from nanoinfer.kernels.experts.operand import can_multiply_groups
from nanoinfer.kernels.experts.products import expert_mlps
from nanoinfer.kernels.experts.route import Routes
from nanoinfer.kernels.groups import GroupWeight
from nanoinfer.kernels.linear.activation import AnyActivation
from nanoinfer.kernels.linear.cpu.in_parts import WeightInParts
from nanoinfer.kernels.linear.in_order.order import WeightShape
from nanoinfer.weights.formats.expert_shards import ExpertBiases, expert_sections, stack_shards
from nanoinfer.weights.formats.experts import Experts, ExpertSizes, ExpertTensors, OutputShare
from nanoinfer.weights.formats.groups.layout import Layout
from nanoinfer.weights.formats.groups.store import GroupStore
from nanoinfer.weights.formats.groups.tensors import of_plain, paired_shards, rounded_parts, shards_of, stored_names
from nanoinfer.weights.shards import Shard, rows_and_outputs

# Of all experts, for one of the two products.
Weights: TypeAlias = Tensor | GroupWeight | list[WeightInParts]


class GroupExperts(Experts):
    """Each store has one expert's rows after the other's: the gates before the ups, and downs."""

    def __init__(
        self,
        tensors: ExpertTensors,
        sizes: ExpertSizes,
        layout: Layout,
        label: str,
        output_share: OutputShare | None = None,
        biases: bool = False,
        down_layout: Layout | None = None,
    ) -> None:
        """label: what messages call the format; output_share, biases: as for Format.make_experts

        down_layout: that of downs; None: that of the others
        """
        super().__init__(tensors, sizes, output_share)
        above, downs, columns = expert_sections(tensors, sizes, output_share)
        self.gate_up = GroupStore(above, sizes.hidden_size, layout, label)
        self.down = GroupStore(downs, columns, down_layout or layout, label)
        self.biases = ExpertBiases(tensors, sizes, output_share, biases)
        self._dtype = torch.get_default_dtype()
        self._in_order = False
        self._is_in_parts = False
        self._parts: list[Weights] = []  # views, which what is written later fills; none in act order

    def forward(
        self,
        x: Tensor,
        routes: Routes,
        activation: AnyActivation,
        may_split: bool = False,
        adapters: ExpertAdapters | None = None,
    ) -> Tensor:
        """Multiply, as kernels.experts.products.expert_mlps does."""
        gather = None if self.output_share is None else self.output_share.gather
        gate_up, down = self._weights()
        how = may_split, self._in_order, gather
        return expert_mlps(x, routes, gate_up, down, activation, *how, *self.biases.added, adapters, self.skipped_from)

    def _weights(self) -> list[Weights]:
        """Return what the products read: the stores, or where no kernel reads both, the model's dtype."""
        stores = self.gate_up, self.down
        if self._is_in_parts:
            return self._parts or [self._in_parts(store) for store in stores]
        if all(store.keeps(self._dtype) for store in stores):
            return [store.remember(partial(self._dense, store)) for store in stores]
        weights = self._that_kernels_read()
        return list(weights) if weights else [self._dense(store) for store in stores]

    def _that_kernels_read(self) -> list[GroupWeight]:
        """Return the stores' weights, expert by expert; none, if the products cannot read both."""
        found = []
        for store in (self.gate_up, self.down):
            weight = _neighbours(store)
            if weight is None or (weight.words.is_cuda and not can_multiply_groups(weight)):
                return []
            found.append(self._of_experts(weight))
        return found

    def _dense(self, store: GroupStore) -> Tensor:
        return store.dense(self._dtype).unflatten(0, (self.sizes.held, -1))

    def _in_parts(self, store: GroupStore) -> list[WeightInParts]:
        weight = _neighbours(store)
        each = self._dense(store) if weight is None else weight.split(len(weight.words) // self.sizes.held)
        cut = rows_and_outputs(store.sections[: len(store.sections) // self.sizes.held])  # all experts are cut alike
        return [WeightInParts(one, cut) for one in each]

    def _of_experts(self, weight: GroupWeight) -> GroupWeight:
        """Return a weight expert by expert, whose tensors have a dimension more."""
        return weight.map(lambda part: part.unflatten(0, (self.sizes.held, -1)))

    def fix_order(self, used: int, activation: AnyActivation) -> None:
        """Let a GPU's products add up in one order; raises ValueError as check_order does, and for groups in no order.

        used: experts that a token takes
        """
        weights = self._that_kernels_read()
        if not weights:
            stores = self.gate_up, self.down
            label, sizes = stores[0].label, " and ".join(f"{store.group} of {store.in_features}" for store in stores)
            raise ValueError(
                f"deterministic=True: with experts in {label}, all inputs must share a scale, or neighbours whose"
                f" number is a power of two from 16 on; here {sizes} share one; device='cpu' takes all"
            )
        gate_up, down = map(WeightShape.like, weights)
        check_order(gate_up, down, used, activation, self._dtype, self.gate_up.words.device)
        self._in_order = True

    def fix_parts(self) -> None:
        """Let the CPU multiply by parts, whose shapes do not depend on the number of ranks."""
        self._is_in_parts = True
        if self.gate_up.order is None:
            self._parts = [self._in_parts(store) for store in (self.gate_up, self.down)]

    def finish(self) -> None:
        """Bring the inputs into their order, if groups have one."""
        self.gate_up.finish()
        self.down.finish()

    def shards(self) -> Iterator[Shard]:
        """Yield the shards of each expert's tensors, or of stacks of all, and of the stacks of plain matrices."""
        dim = 1 if self.output_share is None else 0
        layout = self.gate_up.layout
        if self.tensors.paired:
            yield from paired_shards(self.gate_up, self.down, self.tensors, self.sizes, dim)
        if self.tensors.paired and (layout.stacked or not layout.fields):
            return
        yield from shards_of(self.gate_up)
        yield from shards_of(self.down)
        if layout.rounds and not self.tensors.paired:
            parts = rounded_parts(self.gate_up), rounded_parts(self.down)
            stored = _all_names(self.gate_up), _all_names(self.down)
            for shard in stack_shards(self.tensors, self.sizes, *parts, dim, stored):
                yield of_plain(shard, self.gate_up)


def _neighbours(store: GroupStore) -> GroupWeight | None:
    """Return the weight whose groups are neighbours in the checkpoint's order, too; None: there is none."""
    return store.weight if store.order is None else None


def _all_names(store: GroupStore) -> tuple[str, ...]:
    """Return the names of all tensors that a checkpoint in the store's format has for it."""
    return tuple(name for section in store.sections for name in stored_names(store.layout, f"{section.name}."))
