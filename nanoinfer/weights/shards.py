"""Shards: which tensors of a checkpoint fill a model's parameters, and how."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

ROWS_TOGETHER = 128  # a tensor may be written in parts that begin at multiples of so many rows: no block of a format,
# whose numbers share a scale, is cut then
FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
NUMBERS_AT_ONCE = 1 << 24  # that a format converts, so that a large tensor needs little memory beside its own
SPREAD = 0.02  # the standard deviation of random weights


class Filled(Protocol):
    """What a tensor fills."""

    def copy_(self, values: Tensor) -> object:
        """Write all of it, from any device and dtype."""
        ...


class Written(Filled, Protocol):
    """Part of a parameter that is not stored as a plain tensor; it is written as a slice of a tensor is."""

    @property
    def shape(self) -> torch.Size:
        """That of the tensor that fills it."""
        ...

    @property
    def whole(self) -> Any:
        """The parameter: one object for all parts of it, a tensor or what has an `unpacked` of its own."""
        ...

    def __getitem__(self, rows: slice) -> Written: ...

    def unpacked(self) -> Tensor:
        """Return its numbers as a plain tensor."""
        ...


@runtime_checkable
class Drawn(Written, Protocol):
    """Such a part that no floats fill, so that random ones cannot, either."""

    def draw(self, generator: torch.Generator) -> None:
        """Fill it with random numbers, so that the weights spread as those that floats fill do."""
        ...


@runtime_checkable
class Saved(Written, Protocol):
    """Such a part that a checkpoint can have as it is."""

    @property
    def dtype(self) -> torch.dtype:
        """That of the checkpoint's tensor."""
        ...

    def copy_to(self, stored: Tensor) -> None:
        """Write what fills it into `stored`, a slice of the checkpoint's tensor in host memory."""
        ...


class Bring(Protocol):
    """Brings what an Away needs, from its home in host memory.

    is_elsewhere: another process writes there, what all are told to write; what this one writes is dropped
    """

    @property
    def is_elsewhere(self) -> bool:
        """Whether what is written is dropped."""
        ...

    def __call__(self, writes: bool) -> object:
        """Have the numbers where they are used. writes: they will change there"""
        ...

    def at_home(self, own: Tensor) -> Tensor:
        """Return what host memory has of a tensor in the shared memory, until the numbers are brought."""
        ...


class Away:
    """A target whose memory is not its own: a layer's numbers are there only while somebody uses them.

    It is written and read as any Written is, and brings the numbers for that.
    """

    def __init__(self, target: Tensor | Written, bring: Bring) -> None:
        """target: the one in the shared memory"""
        self.target, self._bring = target, bring

    def at_hand(self, writes: bool = False) -> Tensor | Written:
        """Return the target, whose numbers are there until another layer's are brought. writes: they will change"""
        self._bring(writes)
        return self.target

    @property
    def is_elsewhere(self) -> bool:
        """Whether another process writes the numbers, and checks them."""
        return self._bring.is_elsewhere

    def at_home(self) -> Tensor:
        """Return a plain target's own place in host memory, which may be written until the numbers are brought.

        The device may still be writing there: whoever writes synchronizes with it first.
        """
        assert isinstance(self.target, Tensor)
        return self._bring.at_home(self.target)

    @property
    def shape(self) -> torch.Size:
        """The target's."""
        return self.target.shape

    @property
    def whole(self) -> Away:
        """The parameter of which the target is a part."""
        return Away(whole_of(self.target), self._bring)

    def __getitem__(self, rows: slice) -> Away:
        return Away(self.target[rows], self._bring)

    def copy_(self, values: Tensor) -> None:
        """Write all of the target."""
        self.at_hand(writes=True).copy_(values)

    def unpacked(self) -> Tensor:
        """Return the target's numbers, which stay until another layer's are brought."""
        target = self.at_hand()
        return target if isinstance(target, Tensor) else target.unpacked()


Target = Tensor | Written


def at_hand(target: Target, writes: bool = False) -> Target:
    """Return a target that is where its numbers are. writes: they will change"""
    return target.at_hand(writes) if isinstance(target, Away) else target


def is_elsewhere(target: object) -> bool:
    """Return whether another process writes a target's numbers, and checks them."""
    return isinstance(target, Away) and target.is_elsewhere


def is_tensor(target: Target) -> bool:
    """Return whether a target is a plain tensor, also one that is Away."""
    return isinstance(target.target if isinstance(target, Away) else target, Tensor)


def whole_of(target: Target) -> Any:
    """Return the parameter of which a target is a slice."""
    if isinstance(target, Tensor):
        return target if target._base is None else target._base
    return target.whole


Fill = Literal["noise", "ones", "zeros"]


@dataclass(frozen=True)
class Part:
    """Which part of a tensor a matrix is: of equal ones, one below another, or if dim is 1, side by side."""

    number: int
    count: int
    dim: int

    def whole(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the shape of the tensor that has parts of this shape."""
        rows, columns = shape
        return (rows * self.count, columns) if self.dim == 0 else (rows, columns * self.count)


@dataclass(slots=True)
class Shard:
    """A tensor of a checkpoint, or a slice of it, and the parameter, or slice of it, that it fills on this rank.

    name: the tensor's name in the checkpoint
    target: the parameter to fill, or a slice of it
    shape: the whole tensor's shape
    start: the slice of the tensor begins here along `dim`, and is as long there as the target
    step: the slice takes every so many-th row, or column
    across: the slice begins here along the other dimension, and is as long there as the target; None: takes all
    random: the numbers that fill the target if there is no checkpoint
    entry: the tensor is a stack of such tensors, along a first dimension that `dim` does not count; use this one
    always_turned: the stack's matrices are stored as [in, out], never as `shape` says
    is_flat: the stack's matrices are stored as one: the rows of one after those of another
    replaces: names of the tensors that a checkpoint may store instead
    optional: few checkpoints have the tensor; the target holds what it needs without it
    is_constant: no training changes it, and a trainer's named_parameters() lack it: an update may leave it out
    is_limit: it bounds other numbers, and may be infinite
    dtypes: the types of numbers that the tensor may have
    needs: the names of the tensors, such as scales, that must come too if the tensor has none of FLOATS
    refusal: why no such tensor can be taken; "": it can
    only_updates: why a checkpoint cannot hold it, but an update may; "": both may
    takes_all: whether the target takes the whole tensor
    """

    name: str
    target: Target
    shape: tuple[int, ...]
    start: int = 0
    dim: int = 0
    step: int = 1
    across: int | None = None
    random: Fill = "noise"
    entry: int | None = None
    always_turned: bool = False
    is_flat: bool = False
    replaces: tuple[str, ...] = ()
    optional: bool = False
    is_constant: bool = False
    is_limit: bool = False
    dtypes: frozenset[torch.dtype] = FLOATS
    needs: tuple[str, ...] = ()
    refusal: str = ""
    only_updates: str = ""
    takes_all: bool = field(init=False)

    def __post_init__(self) -> None:
        self.takes_all = self.entry is None and self.target.shape == self.shape

    def is_turned(self, shape: Iterable[int]) -> bool:
        """Whether a stack has this shape because its matrices are stored as [in, out], as Qwen3-VL-MoE's are."""
        may_be = self.entry is not None and self.dtypes <= FLOATS  # only stacks of plain matrices
        if not may_be or (tuple(shape) == self.shape and not self.always_turned):
            return False
        count, rows, columns = self.shape
        return tuple(shape) == (count, columns, rows)

    @property
    def is_another_form(self) -> bool:
        """Whether what the tensor replaces may not come beside it: a stack, or numbers that a format writes itself.

        Of plain tensors of two names, a checkpoint may store both.
        """
        return self.entry is not None or (bool(self.replaces) and not is_tensor(self.target))

    def under(self, module: str, other: str) -> Shard:
        """Return the shard of the tensor that a checkpoint may store in another module instead."""
        name, *needs = (one.replace(module, other, 1) for one in (self.name, *self.needs))
        return replace(self, name=name, replaces=(self.name, *self.replaces), needs=tuple(needs))

    def within(self, part: Part | None, turned: bool = False) -> Shard:
        """Return the shard of the tensor of which this one's is a part; None: it is all of it.

        turned: the checkpoint stores the tensor as [in, out]
        """
        if part is None:
            return self
        dim = 1 - part.dim if turned else part.dim
        own = replace(part, dim=dim)
        first = part.number * self.shape[dim]
        shape = *own.whole(self.shape[:2]), *self.shape[2:]
        if dim == self.dim:
            return replace(self, shape=shape, start=self.start + first)
        return replace(self, shape=shape, across=first)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape that the tensor has in a checkpoint; a stack may also be turned, see is_turned."""
        shape = self.shape
        if self.always_turned:
            count, rows, columns = shape
            shape = count, columns, rows
        return (shape[0] * shape[1], *shape[2:]) if self.is_flat else shape

    def upright(self, tensor: Tensor) -> Tensor:
        """Return a view of a checkpoint's tensor that has the shape that `shape` says."""
        stack = tensor.unflatten(0, (self.shape[0], -1)) if self.is_flat else tensor
        return stack.mT if self.is_turned(stack.shape) else stack

    @property
    def index(self) -> tuple[slice | int, ...]:
        """The index that slices the whole tensor."""
        index: list[slice | int] = [slice(None)] * len(self.target.shape)
        end = self.start + self.target.shape[self.dim] * self.step
        index[self.dim] = slice(self.start, end - self.step + 1, self.step)
        if self.across is not None:
            other = 1 - self.dim
            index[other] = slice(self.across, self.across + self.target.shape[other])
        return tuple(index) if self.entry is None else (self.entry, *index)

    def meet(self, rows: Tensor, first: int) -> tuple[Target, Tensor] | None:
        """Return the target's part that some rows of the tensor, or of its entry, fill, and what fills it.

        first: the first of the rows; returns None if the target needs none of them
        """
        target, start, step = self.target, self.start, self.step
        if self.dim == 1:
            start, step = self.across or 0, 1
        columns = self.index[1:] if self.entry is None else self.index[2:]
        rows = rows[(slice(None), *columns)]
        begin, end = (max(-(-(row - start) // step), 0) for row in (first, first + len(rows)))
        end = min(end, target.shape[0])
        if begin >= end:
            return None
        return target[begin:end], rows[start + begin * step - first :: step][: end - begin]


@dataclass(frozen=True)
class Section:
    """Neighbouring rows of a matrix that one tensor of a checkpoint, or a slice of it, fills.

    name: the tensor's name without ".weight"
    rows: how many rows of the matrix they are; the rows of the next Section follow
    shape: [out_features, in_features] of the whole tensor
    start: the first of the tensor's rows that is used, or if dim is 1, the first of its columns
    part: given if the tensor is only this part of the checkpoint's, which has the name; shape and start are the part's
    fused: if the tensor holds several projections, how many of its rows belong to this one; None: all
    """

    name: str
    rows: int
    shape: tuple[int, int]
    start: int
    dim: int = 0
    fused: int | None = None
    part: Part | None = None

    @property
    def whole_shape(self) -> tuple[int, int]:
        """The shape of the checkpoint's tensor."""
        return self.shape if self.part is None else self.part.whole(self.shape)

    @property
    def outputs(self) -> int:
        """How many outputs this section's projection has, on all ranks together."""
        return self.shape[0] if self.fused is None else self.fused


def rows_of(sections: Iterable[Section]) -> Iterator[slice]:
    """Yield the rows of a matrix that each section fills."""
    first = 0
    for section in sections:
        yield slice(first, first + section.rows)
        first += section.rows


def rows_and_outputs(sections: list[Section]) -> list[tuple[int, int]]:
    """Return what WeightInParts takes: how many rows each section has, and how many outputs its projection has."""
    return [(section.rows, section.outputs) for section in sections]


def bias_shards(bias: Tensor, sections: list[Section]) -> Iterator[Shard]:
    """Yield the shards of a matrix's bias, [rows]: NAME.bias for each of its sections."""
    for rows, section in zip(bias.split([section.rows for section in sections]), sections, strict=True):
        start = section.start if section.dim == 0 else 0
        yield Shard(f"{section.name}.bias", rows, section.shape[:1], start, random="zeros")


Table = dict[str, list[Shard]]  # by the tensor's name


@runtime_checkable
class HasShards(Protocol):
    """A module with weights of its own."""

    def shards(self) -> Iterator[Shard]:
        """Yield the shards that fill this module's parameters."""
        ...


def table_of(model: nn.Module, away: Mapping[nn.Module, Bring] = MappingProxyType({})) -> Table:
    """Collect all shards of a model, by the name of the tensor in the checkpoint.

    away: the modules whose parameters are not always where they are used, and what brings these
    """
    table: Table = {}
    for module in model.modules():
        if isinstance(module, HasShards):
            for shard in module.shards():
                if (bring := away.get(module)) is not None:
                    shard = replace(shard, target=Away(shard.target, bring))
                table.setdefault(shard.name, []).append(shard)
    return table


def device_of_table(table: Table) -> torch.device:
    """Return where the model's weights are."""
    targets = (shard.target for shards in table.values() for shard in shards)
    return next((target.device for target in targets if isinstance(target, Tensor)), torch.device("cpu"))
