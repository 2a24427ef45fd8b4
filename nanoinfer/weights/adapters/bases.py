"""Bases: the matrices of a rank beside which adapters stand, and what of an adapter each one takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from torch import nn

from nanoinfer.weights.formats.expert_shards import expert_sections
from nanoinfer.weights.formats.experts import Experts
from nanoinfer.weights.formats.matrix import Derived, Matrix
from nanoinfer.weights.shards import Section

RANKS_TOGETHER = 16  # a slot's rank is a multiple of it: the inner size that a GPU's tensor cores multiply


def slot_rank(max_rank: int) -> int:
    """Return the rank of a slot that adapters of at most this rank fit into."""
    return -(-max_rank // RANKS_TOGETHER) * RANKS_TOGETHER


@dataclass(frozen=True)
class BaseRows:
    """Neighbouring rows of a base that one tensor of a checkpoint fills.

    module: the tensor's, as the checkpoint names it
    sections: each with the rows of the base that it fills
    """

    module: str
    sections: tuple[tuple[Section, slice], ...]

    @property
    def rows(self) -> int:
        """How many rows of the base they are."""
        return sum(section.rows for section, _ in self.sections)


@dataclass(frozen=True)
class Base:
    """A matrix, [outputs, inputs], of this rank. Beside it, each slot has matrices a and b.

    For each part, a has a slot's rank of rows: [parts * rank, inputs]. Row o of b, [outputs, rank], multiplies what the
    rows of o's own part make of an input.

    sections: the base's, in their rows' order
    inputs: this rank's
    """

    sections: tuple[Section, ...]
    inputs: int

    @cached_property
    def parts(self) -> tuple[BaseRows, ...]:
        """Each run of sections of one tensor."""
        placed, first = [], 0
        for section in self.sections:
            placed.append((section, slice(first, first + section.rows)))
            first += section.rows
        return tuple(BaseRows(name, tuple(run)) for name, run in groupby(placed, lambda pair: pair[0].name))

    @property
    def part_rows(self) -> tuple[int, ...]:
        """How many outputs each part has."""
        return tuple(part.rows for part in self.parts)

    @cached_property
    def columns(self) -> slice:
        """Which of a whole matrix's inputs are this rank's."""
        first = self.sections[0].start if self.sections[0].dim == 1 else 0
        return slice(first, first + self.inputs)

    def shapes(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the shapes of a and b in a slot. rank: the slot's"""
        return (len(self.parts) * rank, self.inputs), (sum(self.part_rows), rank)


class Bases:
    """Those of a model on this rank.

    of_matrices, of_experts: by their module. The latter are those of gates and ups, and those of downs, of each expert
    head: that of the output projection, also where it is the embedding's matrix; None: it takes no adapters
    """

    def __init__(self, model: nn.Module, head: Section | None) -> None:
        """head: the rows of the output projection"""
        self.head = None if head is None else Base((head,), head.shape[1])
        self.of_matrices: dict[Matrix, Base] = {}
        self.of_experts: dict[Experts, tuple[list[Base], list[Base]]] = {}
        kinds = Matrix, Derived
        inner = {child for module in model.modules() if isinstance(module, kinds) for child in module.children()}
        for module in model.modules():
            if module in inner:
                continue
            if isinstance(module, Experts):
                self.of_experts[module] = _of_experts(module)
            elif isinstance(module, Matrix) and module.takes_adapters and not _is(module, head):
                self.of_matrices[module] = Base(tuple(module.sections), module.in_features)

    def __iter__(self) -> Iterator[Base]:
        """Yield all of them."""
        yield from self.of_matrices.values()
        for gate_ups, downs in self.of_experts.values():
            yield from gate_ups
            yield from downs
        if self.head is not None:
            yield self.head


def _is(matrix: Matrix, head: Section | None) -> bool:
    return head is not None and matrix.sections[0].name == head.name


def _of_experts(experts: Experts) -> tuple[list[Base], list[Base]]:
    above, downs, columns = expert_sections(experts.tensors, experts.sizes, experts.output_share)
    parts = len(experts.tensors.above)
    of_each = zip(*(above[part::parts] for part in range(parts)), strict=True)
    return [Base(own, experts.sizes.hidden_size) for own in of_each], [Base((down,), columns) for down in downs]
