"""Shards: which tensors of a checkpoint fill a model's parameters, and how."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor, nn

Fill = Literal["noise", "ones", "zeros"]


@dataclass(slots=True)
class Shard:
    """A tensor of a checkpoint, or a slice of it, and the parameter, or slice of it, that it fills on this rank.

    Two shards may have one target: then the checkpoint must store at least one of the two tensors.

    name: the tensor's name in the checkpoint
    target: the parameter to fill, or a slice of it
    shape: the whole tensor's shape
    start: the slice of the tensor begins here along `dim`, and is as long there as the target
    random: the numbers that fill the target if there is no checkpoint
    """

    name: str
    target: Tensor
    shape: tuple[int, ...]
    start: int = 0
    dim: int = 0
    random: Fill = "noise"

    @property
    def index(self) -> tuple[slice, ...]:
        """The index that slices the whole tensor."""
        index = [slice(None)] * len(self.shape)
        index[self.dim] = slice(self.start, self.start + self.target.shape[self.dim])
        return tuple(index)


Table = dict[str, list[Shard]]  # by the tensor's name


@runtime_checkable
class HasShards(Protocol):
    """A module with weights of its own."""

    def shards(self) -> Iterator[Shard]:
        """Yield the shards that fill this module's parameters."""
        ...


def table_of(model: nn.Module) -> Table:
    """Collect all shards of a model, by the name of the tensor in the checkpoint."""
    table: Table = {}
    for module in model.modules():
        if isinstance(module, HasShards):
            for shard in module.shards():
                table.setdefault(shard.name, []).append(shard)
    return table
