"""Shards: which tensors of a checkpoint fill a model's parameters, and how."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor, nn

Fill = Literal["noise", "ones", "zeros"]


@dataclass(slots=True)
class Shard:
    """What one tensor of a checkpoint, or a part of it, fills on this rank. Where two have one target, either will do.

    name: the tensor's, in the checkpoint
    target: the parameter, or the part of it, that is filled
    shape: the whole tensor's
    start: what fills the target begins here along `dim`, and is as long as the target there
    random: what the target is filled with when there is no checkpoint
    """

    name: str
    target: Tensor
    shape: tuple[int, ...]
    start: int = 0
    dim: int = 0
    random: Fill = "noise"

    @property
    def index(self) -> tuple[slice, ...]:
        """Where in the whole tensor it lies."""
        index = [slice(None)] * len(self.shape)
        index[self.dim] = slice(self.start, self.start + self.target.shape[self.dim])
        return tuple(index)


Table = dict[str, list[Shard]]  # by the tensor's name


@runtime_checkable
class HasShards(Protocol):
    """A module with weights of its own."""

    def shards(self) -> Iterator[Shard]:
        """The checkpoint tensors that fill this module's parameters."""
        ...


def table_of(model: nn.Module) -> Table:
    """Every tensor that a model takes from a checkpoint, with what it fills."""
    table: Table = {}
    for module in model.modules():
        if isinstance(module, HasShards):
            for shard in module.shards():
                table.setdefault(shard.name, []).append(shard)
    return table
