"""GgufTensor: reads a tensor of a GGUF file as safetensors' slice objects read theirs, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanoinfer.gguf.header import Entry, import_gguf

PLAIN = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Order:
    """How rows or columns lie: in the file [count, outer, inner, size], in the checkpoint [count, inner, outer, size].

    outer: -1: as many as there are
    fixed: so many lie before these, as in the checkpoint
    """

    count: int
    outer: int
    inner: int
    size: int = 1
    fixed: int = 0

    def places(self, total: int, unit: int = 1) -> Tensor:
        """Return where in the file each of the checkpoint's is. unit: neighbours that count as one"""
        fixed, sizes = self.fixed // unit, (self.count, self.outer, self.inner, self.size // unit)
        moved = torch.arange(fixed, total // unit).reshape(sizes).transpose(1, 2).flatten()
        return torch.cat([torch.arange(fixed), moved])


@dataclass(frozen=True)
class Change:
    """What sets a file's tensor apart from the checkpoint's.

    rows, columns: their orders; None: they are the checkpoint's
    more: the numbers are so much more
    is_exponential: they are -exp(x)
    """

    rows: Order | None = None
    columns: Order | None = None
    more: float = 0.0
    is_exponential: bool = False


UNCHANGED = Change()


@dataclass(frozen=True)
class GgufTensor:
    """A tensor, or one expert's matrix of a stack.

    shape: as the checkpoint has it, which may differ from the file's by dimensions of one, or be flat
    number: of the expert; None: all
    half: of its rows, where a stack has gates above ups; None: both
    """

    entry: Entry
    shape: tuple[int, ...]
    change: Change = UNCHANGED
    number: int | None = None
    half: int | None = None

    @property
    def entries(self) -> list[Entry]:
        """Where it lies in the file."""
        return [self.entry]

    def get_shape(self) -> list[int]:
        """Return the shape."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """Return the type of the numbers, as safetensors names it; those of few bits become F32."""
        return self.entry.type if self.entry.type in PLAIN and not self._changes_numbers else "F32"

    def __getitem__(self, index: Any) -> Tensor:
        """Return some of the numbers; of a matrix, no other rows are read."""
        index = (slice(None),) if index is ... else index if isinstance(index, tuple) else (index,)
        order = self.change.rows
        if len(self.shape) == 1:
            numbers = self._numbers(self._stored).flatten()
            return (numbers if order is None else numbers[order.places(len(numbers))])[index]
        numbers = self._numbers(self.stored_rows(index[0]))
        if self.change.columns is not None:
            numbers = numbers[:, self.change.columns.places(numbers.shape[1])]
        return numbers.reshape(-1, *self.shape[1:])[:, *index[1:]]

    def stored_rows(self, rows: slice | Tensor) -> np.ndarray:
        """Return the bytes of some of the checkpoint's rows: of a slice, or of their numbers."""
        stored, order = self._stored, self.change.rows
        if order is not None:
            rows = order.places(len(stored))[rows]
        return np.asarray(stored[rows.numpy() if isinstance(rows, Tensor) else rows])

    @property
    def _changes_numbers(self) -> bool:
        return bool(self.change.more) or self.change.is_exponential

    @property
    def _stored(self) -> np.ndarray:
        entry = self.entry
        stored = np.memmap(entry.file, np.uint8, "c", entry.offset, entry.stored)
        if self.number is not None:
            of_expert = stored[self.number]
            return of_expert if self.half is None else of_expert.reshape(2, -1, of_expert.shape[-1])[self.half]
        return stored.reshape(-1, stored.shape[-1]) if stored.ndim > 2 and len(self.shape) == 2 else stored

    def _numbers(self, stored: np.ndarray) -> Tensor:
        """Return the numbers of some rows, in a type that holds each of them."""
        if self.entry.type in PLAIN:
            numbers = torch.from_numpy(np.array(stored)).view(PLAIN[self.entry.type])
        else:
            gguf = import_gguf()
            numbers = torch.from_numpy(gguf.dequantize(np.array(stored), gguf.GGMLQuantizationType[self.entry.type]))
        if self.change.is_exponential:
            return numbers.float().neg().log()
        return numbers.float() - self.change.more if self.change.more else numbers

    def of_expert(self, number: int, half: int | None = None) -> GgufTensor:
        """Return one expert's matrix of a stack, or half of it."""
        _, rows, *columns = self.entry.shape
        return replace(self, number=number, half=half, shape=(rows if half is None else rows // 2, *columns))
