"""Experts: the experts of a layer, in whatever format; and what all formats know of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from nanoinfer.kernels.adapters.experts import ExpertAdapters
from nanoinfer.kernels.adapters.pairs import AdapterRows
from nanoinfer.kernels.experts.products import Gather
from nanoinfer.kernels.experts.route import Routes
from nanoinfer.kernels.linear.activation import AnyActivation
from nanoinfer.weights.shards import Part, Shard


@dataclass(frozen=True)
class ExpertTensors:
    """The names that a checkpoint may give to the tensors of a layer's experts: three for each, or stacks of all.

    expert: the module of one expert; "{}" stands for its number
    gate, up, down: an expert's projections; a gate of None: experts have no gates
    stacks: pairs of stacks, by each pair of names that they may have: gates above ups, or ups alone, and downs
    paired: there are only stacks, of one pair of names. They hold matrices as [in, out], each gate beside its up
    flat: flat stacks that may be there instead: of gates, of ups, and of downs as [in, out]; empty: no such
    shared: the projections of a shared expert, whose parts are the experts that all tokens take; empty: there are none.
        Gates and ups may be in one tensor, the ups below
    """

    expert: str
    gate: str | None
    up: str
    down: str
    stacks: tuple[tuple[str, str], ...]
    paired: bool = False
    flat: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()

    @property
    def above(self) -> tuple[str, ...]:
        """The projections of the first product, in the order of its rows: gate and up, or up alone."""
        return (self.up,) if self.gate is None else (self.gate, self.up)

    def module(self, projection: str, number: int) -> str:
        """Return the name of one expert's projection."""
        return f"{self.expert.format(number)}.{projection}"

    def of(self, projection: str, number: int) -> str:
        """Return the name of the tensor of one expert's projection."""
        return f"{self.module(projection, number)}.weight"

    def part_above(self, place: int, number: int, count: int) -> tuple[str, Part]:
        """Return the module of the shared expert that has a projection of one of `count` experts, and which part it is.

        place: the projection's in `above`
        """
        *above, _ = self.shared
        together = len(self.above) // len(above)
        return above[place // together], Part(place % together * count + number, together * count, dim=0)

    def gate_up_stacks(self, count: int) -> dict[str, tuple[str, ...]]:
        """Return the stack of gates and ups by each of its names, with the other tensors that may hold the same.

        count: experts
        """
        single = (self.of(projection, number) for number in range(count) for projection in self.above)
        return _with_others([gate_up for gate_up, _ in self.stacks], tuple(single))

    def down_stacks(self, count: int) -> dict[str, tuple[str, ...]]:
        """Return the same for the stack of downs."""
        downs = (self.of(self.down, number) for number in range(count))
        return _with_others([down for _, down in self.stacks], tuple(downs))


def _with_others(stacks: list[str], single: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    return {stack: (*single, *(other for other in stacks if other != stack)) for stack in stacks}


@dataclass(frozen=True)
class OutputShare:
    """What one rank computes of each expert's result if ranks split outputs, and how it gets the others' shares.

    outputs: this rank's
    gather: puts all ranks' shares side by side, [rows, share] to [rows, ranks * share]
    """

    outputs: range
    gather: Gather


@dataclass(frozen=True)
class ExpertSizes:
    """The sizes of a layer's experts.

    count: experts, of which tokens use a few
    always: further experts, which all tokens take
    size: an expert's intermediate size over all ranks
    start, share: where this rank's share of that size begins, and how long it is
    identities: as for Routing; transformers' stack of gates and ups has an entry for each, which nobody reads
    """

    count: int
    hidden_size: int
    size: int
    start: int
    share: int
    identities: int = 0
    always: int = 0

    @property
    def held(self) -> int:
        """How many experts the layer holds."""
        return self.count + self.always


class ExpertMap(nn.Module, ABC):
    """What a layer of experts multiplies by: experts of some format, or such with adapters beside them."""

    @abstractmethod
    def beside(self, adapters: AdapterRows | None) -> Callable[..., Tensor]:
        """Return Experts.forward, in a step whose rows name these adapters; None: no row names one."""

    @abstractmethod
    def fix_order(self, used: int, activation: AnyActivation) -> None:
        """Let a GPU's products add up in one order, whatever the number of tokens; called once, of filled experts.

        used: experts that a token takes
        Raises ValueError, naming the format, if they cannot.
        """


class Experts(ExpertMap):
    """Two matrices for each expert, and biases if wanted: this rank's share of them. Filled as a Matrix is."""

    def __init__(self, tensors: ExpertTensors, sizes: ExpertSizes, output_share: OutputShare | None = None) -> None:
        """output_share: given if ranks split outputs; None: this rank computes its part of all"""
        super().__init__()
        self.tensors, self.sizes, self.output_share = tensors, sizes, output_share
        self.skipped_from = sizes.count if sizes.identities else None  # the count that expert_mlps takes

    def beside(self, adapters: AdapterRows | None) -> Callable[..., Tensor]:
        """Return the experts themselves: no adapter is beside them."""
        return self

    @abstractmethod
    def forward(
        self,
        x: Tensor,
        routes: Routes,
        activation: AnyActivation,
        may_split: bool = False,
        adapters: ExpertAdapters | None = None,
    ) -> Tensor:
        """Multiply, as kernels.experts.products.expert_mlps does."""

    @abstractmethod
    def fix_parts(self) -> None:
        """Let the CPU multiply by parts, as Matrix.fix_parts says."""

    @abstractmethod
    def shards(self) -> Iterator[Shard]:
        """Yield the shards that fill this module's own parameters."""

    def finish(self) -> None:
        """Do what is to be done once tensors have been written, as Matrix.finish says."""
