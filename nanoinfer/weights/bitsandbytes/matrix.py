"""BnbMatrix: a matrix as bitsandbytes writes it, of several tensors, which is read as codes and scales, or as numbers.

Those of four bits have blocks of neighbours that share a scale, and blocks go on from row to row. Where none has
numbers of two rows, blocks are groups of a row's inputs. Other matrices are read as numbers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanoinfer.kernels.groups import TABLES, Numbers

CODES, SCALES = "_codes", "_scales"  # behind a matrix's name, in the names of its parts
BLOCK = 64  # numbers that share a scale, if they are a group
NUMBERS = "numbers"  # the kind of a matrix that is read so
LARGEST = 127  # the integer that stands for a row's largest value, which is its scale in the file


@dataclass(frozen=True)
class Nested:
    """How scales of four-bit matrices are eight-bit codes themselves, whose blocks have scales, too.

    table: what codes stand for, [256] float32; scales: [blocks] float32; block: codes that share one; offset: of all
    """

    table: Tensor
    scales: Tensor
    block: int
    offset: float

    def scales_of(self, codes: Tensor, first: int) -> Tensor:
        """Return what codes stand for, float32. first: the first of them among those of the matrix"""
        blocks = torch.arange(first, first + len(codes)) // self.block
        return self.table[codes.long()] * self.scales[blocks] + self.offset


class BnbMatrix(ABC):
    """A matrix, and what reads its tensors.

    shape: [outputs, inputs]
    codes, scales: of its tensors, those that have them
    """

    shape: tuple[int, int]
    codes: Any
    scales: Any

    @property
    @abstractmethod
    def kind(self) -> str:
        """What a format is chosen by: the numbers of groups, or NUMBERS."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Those of codes and scales."""

    @property
    @abstractmethod
    def reads(self) -> dict[str, Read]:
        """How each part is read, by the end of its name: CODES and SCALES, or "" for the numbers."""

    def parts(self, name: str, in_bits: bool) -> dict[str, BnbPart]:
        """Return its parts by their names: codes and scales, or numbers. name: the matrix's"""
        return {f"{name}{end}": BnbPart(self, end) for end in ((CODES, SCALES) if in_bits else ("",))}


class Read(NamedTuple):
    """How a part is read: its columns, their type as files name it, and what returns some rows, in any shape."""

    columns: int
    dtype: str
    of_rows: Callable[[range], Tensor]


@dataclass(frozen=True)
class FourBits(BnbMatrix):
    """A matrix of four bits.

    codes: [outputs * inputs / 2, 1] uint8, each with the first number in its higher bits
    scales: [blocks] of a floating type, or if they are nested, uint8
    numbers: what codes are; block: how many share a scale
    """

    shape: tuple[int, int]
    codes: Any
    scales: Any
    numbers: Numbers
    block: int
    nested: Nested | None = None

    @property
    def kind(self) -> str:
        """What a format is chosen by: the numbers of groups, or NUMBERS."""
        return self.numbers if self.block == BLOCK and self.shape[1] % BLOCK == 0 else NUMBERS

    @property
    def num_bytes(self) -> int:
        """Those of codes and scales."""
        return _size(self.codes) + _size(self.scales) * (4 if self.nested is None else 1)

    @property
    def reads(self) -> dict[str, Read]:
        """How each part is read."""
        inputs = self.shape[1]
        return {
            CODES: Read(inputs // 2, "U8", self._codes_of),
            SCALES: Read(inputs // self.block, "F32", self._scales_of),
            "": Read(inputs, "F32", self._numbers_of),
        }

    def _codes_of(self, rows: range) -> Tensor:
        """Return the bytes in which the codes of some rows are."""
        first, end = (place * self.shape[1] for place in (rows.start, rows.stop))
        return torch.as_tensor(self.codes[first // 2 : -(-end // 2)]).flatten()

    def _scales_of(self, rows: range) -> Tensor:
        """Return the scales of the blocks in which some rows are."""
        first, end = (place * self.shape[1] for place in (rows.start, rows.stop))
        stored = torch.as_tensor(self.scales[first // self.block : -(-end // self.block)])
        return stored.float() if self.nested is None else self.nested.scales_of(stored, first // self.block)

    def _numbers_of(self, rows: range) -> Tensor:
        codes, (first, count) = self._codes_of(rows), (place * self.shape[1] for place in (rows.start, len(rows)))
        single = torch.stack([codes >> 4, codes & 15], dim=-1).flatten()[first % 2 :][:count]
        factors = self._scales_of(rows).repeat_interleave(self.block)[first % self.block :][:count]
        return torch.tensor(TABLES[self.numbers], device=codes.device)[single.long()] * factors


@dataclass(frozen=True)
class EightBits(BnbMatrix):
    """A matrix of LLM.int8. codes: [outputs, inputs] int8; scales: [outputs], the rows' largest values"""

    shape: tuple[int, int]
    codes: Any
    scales: Any
    kind = "int8"

    @property
    def num_bytes(self) -> int:
        """Those of codes and scales."""
        return _size(self.codes) + 4 * _size(self.scales)

    @property
    def reads(self) -> dict[str, Read]:
        """How each part is read."""
        inputs = self.shape[1]
        return {
            CODES: Read(inputs, "I8", self._codes_of),
            SCALES: Read(1, "F32", self._scales_of),
            "": Read(inputs, "F32", lambda rows: self._codes_of(rows).float() * self._scales_of(rows).unsqueeze(1)),
        }

    def _codes_of(self, rows: range) -> Tensor:
        return torch.as_tensor(self.codes[rows.start : rows.stop])

    def _scales_of(self, rows: range) -> Tensor:
        return torch.as_tensor(self.scales[rows.start : rows.stop]).float() / LARGEST


@dataclass(frozen=True)
class BnbPart:
    """Reads a part of a matrix as safetensors' slice objects read a tensor. end: of its name"""

    matrix: BnbMatrix
    end: str

    def get_shape(self) -> list[int]:
        """Return [outputs, columns]."""
        return [self.matrix.shape[0], self.matrix.reads[self.end].columns]

    def get_dtype(self) -> str:
        """Return the type of its numbers."""
        return self.matrix.reads[self.end].dtype

    def __getitem__(self, index: Any) -> Tensor:
        """Return some; no other rows are read."""
        rows, columns = index if isinstance(index, tuple) else (slice(None) if index is ... else index, slice(None))
        some, read = range(*rows.indices(self.matrix.shape[0])), self.matrix.reads[self.end]
        return read.of_rows(some).view(len(some), read.columns)[:, columns]


def shape_of(reader: Any) -> list[int]:
    """Return the shape of a tensor, or of one that a slice object reads."""
    return list(reader.shape) if isinstance(reader, Tensor) else reader.get_shape()


def _size(reader: Any) -> int:
    return math.prod(shape_of(reader))
