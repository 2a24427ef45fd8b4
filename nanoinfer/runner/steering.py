"""Steering on a rank's device: the vectors in their slots, and which of them the rows and the chunks name."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanoinfer.kernels.steering import SteeredTokens, SteeringVectors
from nanoinfer.runner.message import ChunkMessage, PrefillMessage
from nanoinfer.runner.steps.row_table import RowTable
from nanoinfer.runner.transfer import upload

NO_SLOT = -1
Vectors = Mapping[int, npt.NDArray[np.float32]]  # by the numbers of hidden states


class SteeringSlots:
    """Room for the vectors of so many steerings, for all hidden states of a model. Captured steps read it.

    table: see SteeringVectors
    """

    def __init__(self, layers: int, count: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        """layers: hidden states of the model; count: slots; size: hidden_size"""
        vectors = torch.zeros(layers, count, size, dtype=dtype, device=device)
        flags = -(-count // 4) * 4  # each layer's begin at a multiple of 16 bytes, or Triton would compile anew
        self.table = SteeringVectors(vectors, torch.zeros(layers, flags, dtype=torch.int32, device=device))

    @property
    def num_bytes(self) -> int:
        """How much memory the slots take."""
        return self.table.vectors.nbytes + self.table.are_set.nbytes

    @torch.inference_mode()
    def write(self, slot: int, vectors: Vectors) -> None:
        """Write vectors into a slot, in place of those that were there."""
        self.table.are_set[:, slot] = 0
        for layer, vector in vectors.items():
            self.table.vectors[layer, slot] = torch.from_numpy(vector).to(self.table.vectors.device)
            self.table.are_set[layer, slot] = 1


class SteeringColumns:
    """Which slots the rows of a batch name, and how strongly."""

    def __init__(self, slots: SteeringSlots, rows: RowTable) -> None:
        self._table = slots.table
        self._slots = rows.column(torch.int32, empty=NO_SLOT)
        self._strengths = rows.column(torch.float32)

    def join(self, rows: slice, message: PrefillMessage) -> None:
        """Let rows have what the chunks have with which they join."""
        joining = [message.chunks[join.chunk] for join in message.joins]
        self._slots[rows] = NO_SLOT
        if any(chunk.steering is not None for chunk in joining):
            self._slots[rows], self._strengths[rows] = self._upload(joining, [1] * len(joining))

    def of_rows(self, rows: slice | Tensor) -> SteeredTokens:
        """Return what rows have, each for one token; rows: the first ones, or of each token its row, int32"""
        if isinstance(rows, slice):
            return SteeredTokens(self._table, self._slots[rows], self._strengths[rows])
        return SteeredTokens(self._table, self._slots.index_select(0, rows), self._strengths.index_select(0, rows))

    def of_chunks(self, chunks: Sequence[ChunkMessage]) -> SteeredTokens | None:
        """Return what the tokens of chunks have; None: none of them has a steering."""
        if all(chunk.steering is None for chunk in chunks):
            return None
        return SteeredTokens(self._table, *self._upload(chunks, [len(chunk.token_ids) for chunk in chunks]))

    def _upload(self, chunks: Sequence[ChunkMessage], counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the slots and strengths of chunks, each as often as its count."""
        slots, strengths = array("i"), array("f")
        for chunk, count in zip(chunks, counts, strict=True):
            slot, strength = chunk.steering or (NO_SLOT, 0.0)
            slots.extend([slot] * count)
            strengths.extend([strength] * count)
        return upload(slots, self._slots.device), upload(strengths, self._slots.device)
