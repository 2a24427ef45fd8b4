"""What reads a checkpoint's tensor that a file has in several tensors, as safetensors' slice objects read theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from nanoinfer.gguf.header import Entry, Header
from nanoinfer.gguf.tensors.blocks import GgufPart, parts_of, span_of, type_of
from nanoinfer.gguf.tensors.tensor import GgufTensor, Order


class Slices(Protocol):
    """Reads a tensor lazily, some rows and columns at a time."""

    def get_shape(self) -> list[int]:
        """Return the shape that the checkpoint's tensor has."""
        ...

    def get_dtype(self) -> str:
        """Return the type of the numbers, as safetensors names it."""
        ...

    def __getitem__(self, index: Any) -> Tensor: ...


class WholeTensor(Slices, Protocol):
    """Slices of one tensor of the checkpoint."""

    @property
    def entries(self) -> list[Entry]:
        """Where the tensors of the file lie that it is read from."""
        ...


class Composition(NamedTuple):
    """How a file has a tensor.

    parts: the names of the file's tensors, without the layer's number
    read: makes what reads them
    """

    parts: tuple[str, ...]
    read: Callable[[Header, list[GgufTensor]], WholeTensor]


@dataclass(frozen=True)
class GgufRows:
    """Reads tensors whose rows lie one tensor's below another's, or as `places` says.

    places: where each of the checkpoint's rows is among all of these
    """

    tensors: list[GgufTensor] | list[GgufPart]
    places: Tensor | None = None

    @property
    def entries(self) -> list[Entry]:
        """Where the tensors lie."""
        return [tensor.entry for tensor in self.tensors if isinstance(tensor, GgufTensor)]

    def get_shape(self) -> list[int]:
        """Return the shape of all together."""
        shapes = [tensor.get_shape() for tensor in self.tensors]
        return [sum(rows for rows, *_ in shapes), *shapes[0][1:]]

    def get_dtype(self) -> str:
        """Return the type of all, or one that holds the numbers of each."""
        types = {tensor.get_dtype() for tensor in self.tensors}
        return types.pop() if len(types) == 1 else "F32"

    def __getitem__(self, index: Any) -> Tensor:
        """Return some; no other rows are read."""
        rows, *columns = (slice(None),) * len(self.get_shape()) if index is ... else index
        wanted = torch.arange(self.get_shape()[0])[rows] if self.places is None else self.places[rows]
        found, among, first = [], [], 0
        for tensor in self.tensors:
            end = first + tensor.get_shape()[0]
            own = ((wanted >= first) & (wanted < end)).nonzero().flatten()
            if len(own):
                found.append(tensor[wanted[own] - first, *columns])
                among.append(own)
            first = end
        return torch.cat(found)[torch.cat(among).argsort()]

    def parts(self) -> dict[str, GgufRows]:
        """Return the parts of all by the ends of their names, as blocks.parts_of does; none: their types differ."""
        assert all(isinstance(tensor, GgufTensor) for tensor in self.tensors)
        if len({entry.type for entry in self.entries}) > 1:
            return {}
        first, *others = (parts_of(tensor) for tensor in self.tensors if isinstance(tensor, GgufTensor))
        return {end: GgufRows([first[end], *(other[end] for other in others)], self.places) for end in first}


@dataclass(frozen=True)
class TurnedStack:
    """Reads stacks of experts' matrices as one, whose matrices are stored as [in, out].

    places: where each of an expert's outputs is: of the first stack's rows, then the next one's
    """

    stacks: list[GgufTensor]
    places: Tensor | None = None

    @property
    def entries(self) -> list[Entry]:
        """Where the stacks lie."""
        return [stack.entry for stack in self.stacks]

    def get_shape(self) -> list[int]:
        """Return [experts, in, out]."""
        return [self.stacks[0].shape[0], *reversed(self._of_expert(0).get_shape())]

    def get_dtype(self) -> str:
        """Return the type of all numbers."""
        return self._of_expert(0).get_dtype()

    def __getitem__(self, index: Any) -> Tensor:
        """Return some of one expert's matrix; no other is read."""
        number, inputs, outputs = index
        return self._of_expert(number)[outputs, inputs].mT

    def _of_expert(self, number: int) -> GgufRows:
        return GgufRows([stack.of_expert(number) for stack in self.stacks], self.places)


@dataclass(frozen=True)
class GgufNumbers:
    """Reads numbers that are made of small tensors, all at once.

    shape: theirs
    """

    tensors: list[GgufTensor]
    make: Callable[..., Tensor]
    shape: tuple[int, ...]

    @property
    def entries(self) -> list[Entry]:
        """Where the tensors lie."""
        return [tensor.entry for tensor in self.tensors]

    def get_shape(self) -> list[int]:
        """Return the shape."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """Return the type in which numbers are made."""
        return "F32"

    def __getitem__(self, index: Any) -> Tensor:
        """Return some."""
        return self.make(*(tensor[...].float() for tensor in self.tensors)).reshape(self.shape)[index]


def in_bits(reader: WholeTensor) -> dict[str, Slices]:
    """Return the parts of a matrix by the ends of their names; none, if its types do not stay in their bits."""
    if isinstance(reader, GgufTensor):
        return dict(parts_of(reader))
    return dict(reader.parts()) if isinstance(reader, GgufRows) else {}


def type_in_bits(reader: WholeTensor) -> str:
    """Return what a quantization_config calls the type of a matrix that stays in its bits."""
    first = reader.tensors[0] if isinstance(reader, GgufRows) else reader
    assert isinstance(first, GgufTensor)
    return type_of(first.entry.type, span_of(first.change))


def as_it_is(header: Header, tensors: list[GgufTensor]) -> GgufTensor:
    """Return the tensor that a file has under another name than gguf's tables say."""
    (tensor,) = tensors
    return tensor


def below(header: Header, tensors: list[GgufTensor]) -> GgufRows:
    """Return what reads tensors as one, their rows one tensor's below another's."""
    return GgufRows(tensors)


def turned(header: Header, tensors: list[GgufTensor]) -> TurnedStack:
    """Return what reads a stack whose matrices a checkpoint has as [in, out]."""
    return TurnedStack(tensors)


def turned_pairs(header: Header, tensors: list[GgufTensor]) -> TurnedStack:
    """Return the same of the stacks of gates and of ups, of which a checkpoint has each gate beside its up."""
    rows = tensors[0].shape[1]
    return TurnedStack(tensors, Order(1, 2, rows).places(2 * rows))


def pairs(header: Header, tensors: list[GgufTensor]) -> GgufNumbers:
    """Return what reads the biases of gates and of ups, of which a checkpoint has each gate's beside its up's."""
    count, size = tensors[0].shape
    return GgufNumbers(tensors, lambda gates, ups: torch.stack([gates, ups], dim=-1), (count, 2 * size))


def keys_and_values(header: Header, tensors: list[GgufTensor]) -> GgufNumbers:
    """Return what reads the projections of keys, which a file has turned, and of values, head by head."""
    (heads, rank, keys), (_, values, _) = (tensor.entry.shape for tensor in tensors)
    return GgufNumbers(tensors, lambda key, value: torch.cat([key.mT, value], dim=1), (heads * (keys + values), rank))


def by_key_heads(header: Header, tensors: list[GgufTensor]) -> GgufRows:
    """Return what reads the delta rule's projections as a checkpoint has them: the rows of one key head together.

    A file has the rows of queries, keys and values, and in another tensor the gates'.
    """
    heads, size = header.needed("ssm.group_count"), header.needed("ssm.state_size")
    values = header.needed("ssm.inner_size") // heads
    sizes = size, size, values, values
    places = torch.arange(heads * sum(sizes)).split([heads * own for own in sizes])
    return GgufRows(tensors, torch.cat([own.unflatten(0, (heads, -1)) for own in places], dim=1).flatten())
