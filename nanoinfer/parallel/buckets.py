"""Buckets: how tensors reach the other ranks from rank 0. These lie in a segment of shared memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from typing import Protocol

import torch
from torch import Tensor

from nanoinfer.parallel.channel import FOLDER, explained, make_segment

PARTS = 3  # of a segment, each of which holds one bucket at a time
PART_BYTES = 16 << 20
LEAST_PART_BYTES = 1 << 20  # the row of a tensor fits
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a tensor in a bucket.

    name: the tensor's name
    entry: the tensor is a stack, and the rows are of this entry of it; None: it is none
    first: the first of the rows
    begin, end: the bytes of the segment that hold them
    """

    name: str
    entry: int | None
    first: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int
    end: int

    def within(self, segment: Tensor) -> Tensor:
        """Return the rows as a view of a segment, [bytes] uint8."""
        return segment[self.begin : self.end].view(self.dtype).view(self.shape)


class Bucket(Protocol):
    """What rank 0 sends to the other ranks: pickled, it is small, because the tensors stay where they are."""

    def read(self, take: Callable[[Piece, Tensor], None]) -> None:
        """Call `take` with each piece and its rows, which it copies."""
        ...


@dataclass(frozen=True, slots=True)
class SharedBucket:
    """A bucket in a segment of shared memory, which is `size` bytes long."""

    segment: str
    size: int
    pieces: list[Piece]

    def read(self, take: Callable[[Piece, Tensor], None]) -> None:
        """Call `take` with each piece and its rows, which it copies."""
        segment = _map(self.segment, self.size)
        for piece in self.pieces:
            take(piece, piece.within(segment))


class SharedBuckets:
    """Rank 0's end: gathers rows in a part of the segment, and sends the part when it is full.

    The channel sends a message when every rank has received the one before, and so has read the bucket before that. So
    of three parts, the next is always free.
    """

    def __init__(self, send: Callable[[Bucket], None]) -> None:
        self._send = send
        self._memory: SharedMemory | None = None
        self._segment = torch.empty(0, dtype=torch.uint8)  # a view of the memory
        self._part_bytes = 0
        self._part = 0  # which is being filled
        self._used = 0  # bytes of the part
        self._pieces: list[Piece] = []  # in the part

    def open(self) -> None:
        """Make the segment. Raises RuntimeError when /dev/shm has no room, saying why and what would help."""
        with explained():
            self._memory = make_segment(PARTS * PART_BYTES, PARTS * LEAST_PART_BYTES)
        self._segment = _map(self._memory.name, self._memory.size)
        self._part_bytes = self._memory.size // PARTS // ALIGNMENT * ALIGNMENT

    def put(self, name: str, tensor: Tensor, is_stack: bool) -> None:
        """Gather a tensor, or the entries of a stack. A full part is sent."""
        for entry, rows in enumerate(tensor) if is_stack else [(None, tensor)]:
            count = self._part_bytes // rows[0].nbytes
            assert count > 0
            for first in range(0, len(rows), count):  # mostly one piece
                self._add(name, entry, first, rows[first : first + count])

    def _add(self, name: str, entry: int | None, first: int, rows: Tensor) -> None:
        if rows.nbytes > self._part_bytes - self._used:
            self.flush()
        begin = self._part * self._part_bytes + self._used
        piece = Piece(name, entry, first, tuple(rows.shape), rows.dtype, begin, begin + rows.nbytes)
        piece.within(self._segment).copy_(rows)
        self._pieces.append(piece)
        self._used += -(-rows.nbytes // ALIGNMENT) * ALIGNMENT

    def flush(self) -> None:
        """Send what has been gathered."""
        if self._pieces:
            assert self._memory is not None
            self._send(SharedBucket(self._memory.name, self._memory.size, self._pieces))
            self._part, self._pieces, self._used = (self._part + 1) % PARTS, [], 0

    def close(self) -> None:
        """Give the segment back, when every rank has read what was sent, or none reads any more."""
        if self._memory is not None:
            self._memory.unlink()
            self._memory.close()


def _map(segment: str, size: int) -> Tensor:
    """Map a segment into this process's memory for as long as the tensor, [size] uint8, or a view of it lives."""
    return torch.from_file(f"{FOLDER}/{segment}", shared=True, size=size, dtype=torch.uint8)
