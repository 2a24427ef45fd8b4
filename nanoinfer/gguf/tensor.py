"""GgufTensor: reads a tensor of a GGUF file as safetensors' slice objects read theirs, in numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanoinfer.gguf.header import Entry, import_gguf

PLAIN = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class GgufTensor:
    """A tensor, or one expert's matrix of a stack.

    shape: as the checkpoint has it, which may differ from the file's by dimensions of one
    number: of the expert; None: all
    heads: its rows are those of so many heads whose halves lie side by side, pair by pair; 0: they are in order
    more: its numbers are so much more than the checkpoint's
    """

    entry: Entry
    shape: tuple[int, ...]
    number: int | None = None
    heads: int = 0
    more: float = 0.0

    def get_shape(self) -> list[int]:
        """Return the shape."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """Return the type of the numbers, as safetensors names it; those of few bits become F32."""
        return self.entry.type if self.entry.type in PLAIN and not self.more else "F32"

    def __getitem__(self, index: Any) -> Tensor:
        """Return some of the numbers; of a matrix, no other rows are read."""
        index = (slice(None),) if index is ... else index if isinstance(index, tuple) else (index,)
        stored = self._stored
        if stored.ndim == 1:
            return self._numbers(stored)[self._order].reshape(self.shape)[index]
        numbers = self._numbers(self.stored_rows(index[0]))
        return numbers.reshape(-1, *self.shape[1:])[:, *index[1:]]

    def stored_rows(self, rows: slice) -> np.ndarray:
        """Return the bytes of some of the checkpoint's rows."""
        if self.heads == 0:
            return self._stored[rows]
        return np.asarray(self._stored[self._order[rows].numpy()])

    @cached_property
    def _order(self) -> Tensor:
        """For each of the checkpoint's rows, the one in the file."""
        rows = torch.arange(self.shape[0] if len(self._stored.shape) > 1 else math.prod(self.shape))
        return rows.unflatten(0, (self.heads, -1, 2)).transpose(1, 2).flatten() if self.heads else rows

    @property
    def _stored(self) -> np.ndarray:
        entry = self.entry
        stored = np.memmap(entry.file, np.uint8, "r", entry.offset, entry.stored)
        if self.number is not None:
            return stored[self.number]
        return stored.reshape(-1, stored.shape[-1]) if stored.ndim > 2 and len(self.shape) == 2 else stored

    def _numbers(self, stored: np.ndarray) -> Tensor:
        """Return the numbers of some rows, in a type that holds each of them."""
        if self.entry.type in PLAIN:
            numbers = torch.from_numpy(np.array(stored)).view(PLAIN[self.entry.type])
        else:
            gguf = import_gguf()
            numbers = torch.from_numpy(gguf.dequantize(np.array(stored), gguf.GGMLQuantizationType[self.entry.type]))
        return numbers.float() - self.more if self.more else numbers

    def of_expert(self, number: int) -> GgufTensor:
        """Return one expert's matrix of a stack."""
        return replace(self, number=number, shape=self.entry.shape[1:])
