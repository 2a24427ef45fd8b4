"""What formats of experts have in common: the sections of stores, plain stacks, and biases."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from nanoinfer.weights.formats.experts import ExpertSizes, ExpertTensors, OutputShare
from nanoinfer.weights.shards import Part, Section, Shard, Target, Written


class Rows(Written, Protocol):
    """Rows of a store, which plain numbers fill."""

    def start(self, dim: int) -> int:
        """Return where what fills it begins in the checkpoint's matrix, along a dimension."""
        ...


def expert_sections(
    tensors: ExpertTensors, sizes: ExpertSizes, output_share: OutputShare | None
) -> tuple[list[Section], list[Section], int]:
    """Return the sections of gates and ups, expert by expert, and those of downs, and how many inputs a down has.

    Experts without gates have those of ups alone.
    """
    count, hidden_size, share, start = sizes.count, sizes.hidden_size, sizes.share, sizes.start
    inward, outward = (sizes.size, hidden_size), (hidden_size, sizes.size)
    above = [
        Section(tensors.module(projection, number), share, inward, start)
        for number in range(count)
        for projection in tensors.above
    ]
    if output_share is None:
        rows, columns, first, dim = hidden_size, share, start, 1
    else:
        rows, columns, first, dim = len(output_share.outputs), sizes.size, output_share.outputs.start, 0
    downs = [Section(tensors.module(tensors.down, number), rows, outward, first, dim) for number in range(count)]
    for number in range(sizes.always):
        for place in range(len(tensors.above)):
            name, part = tensors.part_above(place, number, sizes.always)
            above.append(Section(name, share, inward, start, part=part))
        part = Part(number, sizes.always, dim=1)
        downs.append(Section(tensors.shared[-1], rows, outward, first, dim, part=part))
    return above, downs, columns


def stack_shards(
    tensors: ExpertTensors,
    sizes: ExpertSizes,
    above: Sequence[Rows],
    downs: Sequence[Rows],
    dim: int,
    stored: tuple[tuple[str, ...], tuple[str, ...]] = ((), ()),
) -> Iterator[Shard]:
    """Yield the shards of the stacks of plain matrices that a checkpoint may have.

    above, downs: the rows of the sections; those of experts that all tokens take are in no stack
    dim: that in which ranks split downs
    stored: the names of tensors in the format itself, of gates and ups, and of downs
    """
    count, hidden_size, size = sizes.count, sizes.hidden_size, sizes.size
    gate_up_stacks, down_stacks = tensors.gate_up_stacks(count), tensors.down_stacks(count)
    parts = len(tensors.above)
    gate_up_shape, down_shape = (count + sizes.identities, parts * size, hidden_size), (count, hidden_size, size)
    gate_up_stacks = {stack: (*others, *stored[0]) for stack, others in gate_up_stacks.items()}
    down_stacks = {stack: (*others, *stored[1]) for stack, others in down_stacks.items()}
    above, downs = above[: parts * count], downs[:count]
    for number, down in enumerate(downs):
        own = above[parts * number : parts * (number + 1)]
        for stack, others in gate_up_stacks.items():
            for place, rows in enumerate(own):
                start = place * size + rows.start(0)
                yield Shard(stack, rows, gate_up_shape, start, entry=number, replaces=others)
        for stack, others in down_stacks.items():
            yield Shard(stack, down, down_shape, down.start(dim), dim, entry=number, replaces=others)
    placed = [(rows, rows.start(0)) for rows in above], [(down, down.start(dim)) for down in downs]
    yield from flat_shards(tensors, sizes, *placed, dim, stored)


def flat_shards(
    tensors: ExpertTensors,
    sizes: ExpertSizes,
    above: Sequence[tuple[Target, int]],
    downs: Sequence[tuple[Target, int]],
    dim: int,
    stored: tuple[tuple[str, ...], tuple[str, ...]] = ((), ()),
) -> Iterator[Shard]:
    """Yield the shards of the flat stacks that a checkpoint may have.

    above, downs: what they fill, and where that begins in an expert's matrix; dim, stored: as for stack_shards
    """
    inward, outward = (sizes.count, sizes.size, sizes.hidden_size), (sizes.count, sizes.hidden_size, sizes.size)
    parts = len(tensors.above)
    all_placed = *(above[part::parts] for part in range(parts)), downs
    for name, projection, placed in zip(tensors.flat, (*tensors.above, tensors.down), all_placed, strict=False):
        is_down = projection == tensors.down
        shape, along = (outward, dim) if is_down else (inward, 0)
        others = *(tensors.of(projection, number) for number in range(sizes.count)), *stored[is_down]
        for number, (target, start) in enumerate(placed):
            shard = Shard(name, target, shape, start, along, entry=number, replaces=others)
            yield replace(shard, is_flat=True, always_turned=is_down)


class ExpertBiases(nn.Module):
    """The biases of experts, which only checkpoints of paired tensors hold; or none.

    gate_up: [experts, 2 * share], the gates' first; down: [experts, outputs of this rank]
    """

    gate_up: Tensor | None
    down: Tensor | None

    def __init__(
        self, tensors: ExpertTensors, sizes: ExpertSizes, output_share: OutputShare | None, are_there: bool
    ) -> None:
        super().__init__()
        assert tensors.paired or not are_there
        assert not tensors.paired or tensors.gate is not None
        self._tensors, self._sizes, self._output_share = tensors, sizes, output_share
        outputs = sizes.hidden_size if output_share is None else len(output_share.outputs)
        self.gate_up, self.down = (
            nn.Parameter(torch.empty(sizes.count, size), requires_grad=False) if are_there else None
            for size in (2 * sizes.share, outputs)
        )

    @property
    def added(self) -> tuple[Tensor | None, Tensor | None]:
        """Those that this rank adds: of several ranks whose results are summed, one adds down's."""
        is_ours = self._output_share is not None or self._sizes.start == 0
        return self.gate_up, self.down if is_ours else None

    def shards(self) -> Iterator[Shard]:
        """Yield the shards of the biases."""
        if self.gate_up is None or self.down is None:
            return
        ((gate_up_name, down_name),) = self._tensors.stacks
        sizes = self._sizes
        for place, bias in enumerate(self.gate_up.split(sizes.share, dim=1)):
            name, at = f"{gate_up_name}_bias", 2 * sizes.start + place
            yield Shard(name, bias, (sizes.count, 2 * sizes.size), at, dim=1, step=2, random="zeros")
        outputs = 0 if self._output_share is None else self._output_share.outputs.start
        shape = sizes.count, sizes.hidden_size
        yield Shard(f"{down_name}_bias", self.down, shape, outputs, dim=1, random="zeros")
