"""Blocks: the codes, the scales and the minima in a tensor of few bits, as formats of groups keep them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from nanoinfer.gguf.header import Entry, block_of
from nanoinfer.gguf.tensors.tensor import Change, GgufTensor

# What tensors are called instead of "weight".
CODES, SCALES, MINIMA, FACTORS = "weight_codes", "weight_scales", "weight_minima", "weight_factors"
Numbers = Literal["int4", "int6", "int8", "e2m1"]
PER_K_BLOCK, K_BLOCK = 8, 256  # groups, and numbers
Read = Callable[[Tensor], Tensor]


class Part(NamedTuple):
    """A part of a type's blocks.

    bytes: where it lies in a block
    read: makes of these, [rows, blocks, bytes] uint8 on any device, what groups have, [rows, blocks, groups],
        or numbers, [rows, blocks, groups, numbers of a group], or what multiplies a block's scales and its
        minima, [rows, blocks, factors]
    dtype: of what it makes, as safetensors names it
    """

    bytes: slice
    read: Read
    dtype: str


class Kind(NamedTuple):
    """A type that stays in its bits.

    numbers: what the codes are once they are packed
    group: the neighbouring inputs that share a scale
    parts: by the ends of their names
    """

    numbers: Numbers
    group: int
    parts: dict[str, Part]


def _kind(
    numbers: Numbers,
    codes: Part,
    scales: Part,
    minima: Part | None = None,
    factors: Part | None = None,
    group: int = 32,
) -> Kind:
    parts = {CODES: codes, SCALES: scales, MINIMA: minima, FACTORS: factors}
    return Kind(numbers, group, {name: part for name, part in parts.items() if part is not None})


def _codes(begin: int, end: int, read: Read) -> Part:
    return Part(slice(begin, end), read, "I8")


def _halves(packed: Tensor) -> Tensor:
    """Return the codes of four bits: the first half of a block's in the low bits, the second in the high ones."""
    return torch.cat([packed & 15, packed >> 4], dim=-1).view(torch.int8)


def _five_bits(packed: Tensor) -> Tensor:
    """Return codes whose fifth bits come first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    fifth = (packed[..., :4].unsqueeze(-1) >> shifts & 1).flatten(-2)
    return _halves(packed[..., 4:]) | (fifth << 4).view(torch.int8)


def _floats(packed: Tensor) -> Tensor:
    """Return the numbers of 16 bits."""
    return packed.contiguous().view(torch.float16)


def _k_halves(packed: Tensor) -> Tensor:
    """Return the codes of four bits of a K block's groups, which lie two by two, [..., 8, 32]."""
    pairs = packed.unflatten(-1, (4, 1, 32))
    return torch.cat([pairs & 15, pairs >> 4], dim=-2).flatten(-3, -2)


def _k_five_bits(packed: Tensor) -> Tensor:
    """Return the codes of Q5_K; of a byte's fifth bits, which come first, each is another group's."""
    shifts = torch.arange(PER_K_BLOCK, dtype=torch.uint8, device=packed.device).unsqueeze(-1)
    fifth = packed[..., None, :32] >> shifts & 1
    return (_k_halves(packed[..., 32:]) | fifth << 4).view(torch.int8)


def _k_scales(packed: Tensor) -> Tensor:
    """Return the six bits of a K block's scales, [..., 8] float16."""
    first, _, rest = packed.split(4, dim=-1)
    return torch.cat([first & 63, rest & 15 | first >> 2 & 48], dim=-1).half()


def _k_minima(packed: Tensor) -> Tensor:
    """Return those of its minima."""
    _, second, rest = packed.split(4, dim=-1)
    return torch.cat([second & 63, rest >> 4 | second >> 2 & 48], dim=-1).half()


def _k_six_bits(packed: Tensor) -> Tensor:
    """Return the codes of Q6_K, [..., 16, 16]; each half of a block has its own bytes."""
    low, high = packed[..., :128].unflatten(-1, (2, 1, 64)), packed[..., 128:].unflatten(-1, (2, 1, 32))
    low = torch.cat([low & 15, low >> 4], dim=-2).flatten(-2).unflatten(-1, (4, 32))
    high = high >> torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device).unsqueeze(-1) & 3
    return (low | high << 4).view(torch.int8).flatten(-3).unflatten(-1, (16, 16))


SCALE = Part(slice(0, 2), _floats, "F16")
MINIMUM = Part(slice(2, 4), lambda packed: -_floats(packed), "F16")  # what is added is no minimum
K_PARTS = (
    Part(slice(4, 16), _k_scales, "F16"),
    Part(slice(4, 16), _k_minima, "F16"),
    Part(slice(0, 4), _floats, "F16"),
)
SCALES_OF_16 = Part(slice(192, 208), lambda packed: packed.view(torch.int8).half(), "F16")
KINDS = {
    "Q8_0": _kind("int8", _codes(2, 34, lambda packed: packed.view(torch.int8)), SCALE),
    "Q5_0": _kind("int6", _codes(2, 22, lambda packed: _five_bits(packed) + 16), SCALE),  # they count from 32
    "Q5_1": _kind("int6", _codes(4, 24, _five_bits), SCALE, MINIMUM),
    "Q4_0": _kind("int4", _codes(2, 18, _halves), SCALE),
    "Q4_1": _kind("int4", _codes(4, 20, _halves), SCALE, MINIMUM),
    "MXFP4": _kind("e2m1", _codes(1, 17, _halves), Part(slice(0, 1), lambda packed: packed, "U8")),
    "Q4_K": _kind("int4", _codes(16, 144, lambda packed: _k_halves(packed).view(torch.int8)), *K_PARTS),
    "Q5_K": _kind("int6", _codes(16, 176, _k_five_bits), *K_PARTS),
    "Q6_K": _kind("int6", _codes(0, 192, _k_six_bits), SCALES_OF_16, None, SCALE._replace(bytes=slice(208, 210)), 16),
}


@dataclass(frozen=True)
class GgufPart:
    """Reads the codes of a matrix, its scales or its minima, as safetensors' slice objects read a tensor.

    Or it reads blocks as they are stored, which `unpacked` takes apart on any device.

    name: a key of the type's parts
    """

    tensor: GgufTensor
    name: str

    @property
    def kind(self) -> Kind:
        """That of the tensor's type."""
        return KINDS[self.tensor.entry.type]

    @property
    def _covered(self) -> int:
        """The inputs of an index."""
        return {CODES: 1, FACTORS: span_of(self.tensor.change)}.get(self.name, self.kind.group)

    def get_shape(self) -> list[int]:
        """Return [outputs, inputs], of codes, [outputs, groups], or [outputs, blocks, factors]."""
        rows, inputs = self.tensor.shape
        shape = [rows, inputs // self._covered]
        return [*shape, factors_of(self.kind)] if self.name == FACTORS else shape

    def get_dtype(self) -> str:
        """Return the type of the part."""
        return self.kind.parts[self.name].dtype

    def __getitem__(self, index: Any) -> Tensor:
        """Return some; no other rows are read."""
        return self.unpacked(self.stored(index), index)

    def num_bytes(self, index: Any) -> int:
        """Return how many bytes `stored` returns."""
        rows, columns = _both(index)
        part = self.kind.parts[self.name].bytes
        return len(range(self.tensor.shape[0])[rows]) * len(self._blocks(columns)) * (part.stop - part.start)

    def stored(self, index: Any) -> Tensor:
        """Return the part's bytes of the blocks in which some lie, a view of the file, [rows, blocks, bytes] uint8."""
        rows, columns = _both(index)
        stored, blocks = self.tensor.stored_rows(rows), self._blocks(columns)
        by_block = stored.reshape(len(stored), self.tensor.shape[1] // self._in_block, -1)
        return torch.from_numpy(by_block[:, blocks.start : blocks.stop, self.kind.parts[self.name].bytes])

    def unpacked(self, stored: Tensor, index: Any) -> Tensor:
        """Return what some blocks have. stored: from `stored`, some rows of it, on any device; index: the same"""
        columns = range(self.get_shape()[1])[_both(index)[1]]
        found, first = self.kind.parts[self.name].read(stored), 0
        if self.name == FACTORS:
            found = found.repeat_interleave(self._in_block // self._covered, dim=1)
        else:
            found = found.flatten(1)
        if (order := self.tensor.change.columns) is not None:
            inputs, unit = self.tensor.shape[1], max(self._covered, self.kind.group)
            places = order.places(inputs, unit).to(stored.device)
            found = found.unflatten(1, (inputs // unit, -1)).index_select(1, places).flatten(1, 2)
        else:
            first = self._blocks(_both(index)[1]).start * self._in_block // self._covered
        return found[:, columns.start - first : columns.stop - first]

    @property
    def _in_block(self) -> int:
        return int(block_of(self.tensor.entry.type)[0])

    def _blocks(self, columns: slice) -> range:
        """Return the blocks in which some columns lie; all, where columns have moved."""
        size, count = self._in_block, self.tensor.shape[1] // self._in_block
        if self.tensor.change.columns is not None:
            return range(count)
        some = range(self.get_shape()[1])[columns]
        return range(some.start * self._covered // size, -(-some.stop * self._covered // size))


def _both(index: Any) -> tuple[slice, slice]:
    """Return which rows and columns an index names."""
    return (slice(None), slice(None)) if index is ... else index[:2]


def stays_in_bits(entry: Entry, change: Change) -> bool:
    """Whether a tensor's type does, and nothing moves columns out of their groups."""
    if (kind := KINDS.get(entry.type)) is None:
        return False
    return change.columns is None or change.columns.size % kind.group == 0


def span_of(change: Change) -> int:
    """Return the inputs of a K block whose factors stay neighbours: all, if no columns move."""
    return K_BLOCK if change.columns is None else math.gcd(K_BLOCK, change.columns.size)


def type_of(name: str, span: int) -> str:
    """Return what a quantization_config calls a type whose blocks are of so many inputs."""
    return name if FACTORS not in KINDS[name].parts or span == K_BLOCK else f"{name}/{span}"


def factors_of(kind: Kind) -> int:
    """Return how many factors a block has: of scales, and of minima."""
    return 2 if MINIMA in kind.parts else 1


def parts_of(tensor: GgufTensor) -> dict[str, GgufPart]:
    """Return the parts of a matrix by the ends of their names; none, if its type does not stay in its bits."""
    if not stays_in_bits(tensor.entry, tensor.change) or len(tensor.shape) != 2:
        return {}
    return {name: GgufPart(tensor, name) for name in KINDS[tensor.entry.type].parts}
