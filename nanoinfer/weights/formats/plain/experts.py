"""PlainExperts: the experts of a layer as two matrices of the model's dtype for each expert."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from nanoinfer.kernels.adapters.experts import ExpertAdapters
from nanoinfer.kernels.experts.in_order import check_order
from nanoinfer.kernels.experts.products import expert_mlps
from nanoinfer.kernels.experts.route import Routes
from nanoinfer.kernels.linear.activation import AnyActivation
from nanoinfer.kernels.linear.cpu.in_parts import WeightInParts
from nanoinfer.kernels.linear.in_order.order import WeightShape
from nanoinfer.weights.formats.expert_shards import ExpertBiases, expert_sections, flat_shards
from nanoinfer.weights.formats.experts import Experts, ExpertSizes, ExpertTensors, OutputShare
from nanoinfer.weights.shards import Shard


class PlainExperts(Experts):
    """gate_up, [experts, 2 * share, hidden_size], the gates first; and down, [experts, hidden_size, share].

    Of experts without gates, gate_up is [experts, share, hidden_size].
    A rank holds a share of each expert's intermediate size. If ranks split outputs, it holds a share of down's outputs
    instead: [experts, hidden_size / ranks, size].
    """

    def __init__(
        self,
        tensors: ExpertTensors,
        sizes: ExpertSizes,
        output_share: OutputShare | None = None,
        biases: bool = False,
    ) -> None:
        """output_share: as for Experts

        biases: the products have biases, which only checkpoints of paired tensors hold
        """
        super().__init__(tensors, sizes, output_share)
        gate_up = len(tensors.above) * sizes.share, sizes.hidden_size
        down = (sizes.hidden_size, sizes.share) if output_share is None else (len(output_share.outputs), sizes.size)
        self.gate_up = nn.Parameter(torch.empty(sizes.held, *gate_up), requires_grad=False)
        self.down = nn.Parameter(torch.empty(sizes.held, *down), requires_grad=False)
        self.biases = ExpertBiases(tensors, sizes, output_share, biases)
        self._in_order = False
        self._parts: tuple[list[WeightInParts], list[WeightInParts]] | None = None

    def forward(
        self,
        x: Tensor,
        routes: Routes,
        activation: AnyActivation,
        may_split: bool = False,
        adapters: ExpertAdapters | None = None,
    ) -> Tensor:
        """Multiply, as kernels.experts.products.expert_mlps does."""
        gate_up, down = self._parts or (self.gate_up, self.down)
        gather = None if self.output_share is None else self.output_share.gather
        how = may_split, self._in_order, gather
        return expert_mlps(x, routes, gate_up, down, activation, *how, *self.biases.added, adapters, self.skipped_from)

    def fix_order(self, used: int, activation: AnyActivation) -> None:
        """Let a GPU's products add up in the order of the inputs; raises ValueError as check_order does.

        used: experts that a token takes
        """
        gate_up, down = self.gate_up, self.down
        check_order(WeightShape.like(gate_up), WeightShape.like(down), used, activation, gate_up.dtype, gate_up.device)
        self._in_order = True

    def fix_parts(self) -> None:
        """Let the CPU multiply by parts, whose shapes do not depend on the number of ranks."""
        sizes = self.sizes
        above = [(sizes.share, sizes.size)] * len(self.tensors.above)
        outputs = [(self.down.shape[1], sizes.hidden_size)]
        gate_up = [WeightInParts(weight, above) for weight in self.gate_up]
        self._parts = gate_up, [WeightInParts(weight, outputs) for weight in self.down]

    def shards(self) -> Iterator[Shard]:
        """Yield each expert's shards, and those of the stacked tensors that a checkpoint may have instead."""
        if self.tensors.paired:
            yield from self._paired_shards()
            return
        names = self.tensors
        count, hidden_size, size, start = self.sizes.count, self.sizes.hidden_size, self.sizes.size, self.sizes.start
        first, dim = self._down_part
        inward, outward = (size, hidden_size), (hidden_size, size)
        stacked = count + self.sizes.identities, len(names.above) * size, hidden_size
        gate_up_stacks, down_stacks = names.gate_up_stacks(count), names.down_stacks(count)
        for number in range(count):
            above, down = self.gate_up[number].split(self.sizes.share), self.down[number]
            for projection, rows in zip(names.above, above, strict=True):
                yield Shard(names.of(projection, number), rows, inward, start)
            yield Shard(names.of(names.down, number), down, outward, first, dim)
            for stack, others in gate_up_stacks.items():
                for place, rows in enumerate(above):
                    yield Shard(stack, rows, stacked, place * size + start, entry=number, replaces=others)
            for stack, others in down_stacks.items():
                yield Shard(stack, down, (count, *outward), first, dim, entry=number, replaces=others)
        gates_and_ups = self.gate_up.unflatten(1, (len(names.above), -1)).flatten(0, 1)
        placed = [(rows, start) for rows in gates_and_ups[: count * len(names.above)]]
        yield from flat_shards(names, self.sizes, placed, [(down, first) for down in self.down[:count]], dim)
        above, downs, _ = expert_sections(names, self.sizes, self.output_share)
        sections = above[len(placed) :] + downs[count:]
        for section, target in zip(sections, [*gates_and_ups[len(placed) :], *self.down[count:]], strict=True):
            shard = Shard(f"{section.name}.weight", target, section.shape, section.start, section.dim)
            yield shard.within(section.part)

    @property
    def _down_part(self) -> tuple[int, int]:
        """Where this rank's part of an expert's down begins, and in which dimension."""
        return (self.sizes.start, 1) if self.output_share is None else (self.output_share.outputs.start, 0)

    def _paired_shards(self) -> Iterator[Shard]:
        """Yield the shards of paired tensors."""
        ((gate_up_name, down_name),) = self.tensors.stacks
        count, hidden_size, size, share = self.sizes.count, self.sizes.hidden_size, self.sizes.size, self.sizes.share
        begin, (first, dim) = 2 * self.sizes.start, self._down_part
        for number in range(count):
            for place, rows in enumerate(self.gate_up[number].split(share)):
                shape, at = (count, 2 * size, hidden_size), begin + place
                yield Shard(gate_up_name, rows, shape, at, step=2, entry=number, always_turned=True)
            shape = count, hidden_size, size
            yield Shard(down_name, self.down[number], shape, first, dim, entry=number, always_turned=True)
