"""Buckets: how tensors reach the other ranks from rank 0: through a segment of memory that all of them can read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from typing import Any, Protocol

import torch
from torch import Tensor

from nanoinfer.parallel.channel import FOLDER, explained, make_segment
from nanoinfer.parallel.peer_memory import allocate, close_handle, free, handle_of, open_handle
from nanoinfer.weights.shards import ROWS_TOGETHER

PARTS = 3  # of a segment, each of which holds one bucket at a time
PART_BYTES = 16 << 20
LEAST_PART_BYTES = 8 << 20  # ROWS_TOGETHER rows of a tensor fit
DEVICE_PART_BYTES = 64 << 20
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


class Segment(Protocol):
    """How another rank finds rank 0's segment. It is small when it is pickled."""

    def map(self, device: torch.device) -> AbstractContextManager[Tensor]:
        """Return a context that has the segment as this rank sees it, [bytes] uint8."""
        ...


@dataclass(frozen=True, slots=True)
class SharedSegment:
    """A segment of shared memory."""

    name: str
    size: int

    def map(self, device: torch.device) -> AbstractContextManager[Tensor]:
        """Map it into this process's memory, for as long as the tensor or a view of it lives."""
        return nullcontext(torch.from_file(f"{FOLDER}/{self.name}", shared=True, size=self.size, dtype=torch.uint8))


@dataclass(frozen=True, slots=True)
class DeviceSegment:
    """A segment of rank 0's device memory."""

    handle: bytes
    size: int

    @contextmanager
    def map(self, device: torch.device) -> Iterator[Tensor]:
        """Open it. To torch the memory is this rank's, which reads it over NVLink or PCIe."""
        address = open_handle(self.handle)
        try:
            yield _tensor_at(address, self.size, device)
        finally:
            close_handle(address)


@dataclass(frozen=True, slots=True)
class Bucket:
    """What rank 0 sends to the other ranks: where some tensors are."""

    segment: Segment
    pieces: list[Piece]


class BucketReader:
    """Another rank's end: maps a segment once, until `close`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mapped: dict[Segment, Tensor] = {}
        self._open = ExitStack()

    def read(self, bucket: Bucket, take: Callable[[Piece, Tensor], None]) -> None:
        """Call `take` with each piece and its rows, which it copies; returns when the copies are complete."""
        if bucket.segment not in self._mapped:
            self._mapped[bucket.segment] = self._open.enter_context(bucket.segment.map(self._device))
        segment = self._mapped[bucket.segment]
        for piece in bucket.pieces:
            take(piece, piece.within(segment))
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Let go of all segments."""
        self._mapped.clear()
        self._open.close()


class Buckets(ABC):
    """Rank 0's end: gathers rows in a part of its segment, and sends the part when it is full.

    The channel sends a message when every rank has received the one before, and so has read the bucket before that. So
    of three parts, the next is always free.
    """

    _segment: Segment
    _memory: Tensor  # of the segment, [bytes] uint8

    def __init__(self, send: Callable[[Bucket], None]) -> None:
        self._send = send
        self._parts, self._part_bytes = PARTS, 0
        self._part = 0  # which is being filled
        self._used = 0  # bytes of the part
        self._pieces: list[Piece] = []  # in the part

    @abstractmethod
    def open(self, room: int | None = None) -> None:
        """Make the segment. Raises RuntimeError when there is no room for it, saying why and what would help.

        room: what `room_for` says of all tensors that will be put, together; None: nobody knows
        """

    def put(self, name: str, tensor: Tensor, is_stack: bool) -> None:
        """Gather a tensor, or the entries of a stack. A full part is sent."""
        tensor = tensor if tensor.ndim else tensor.unsqueeze(0)
        for entry, rows in enumerate(tensor) if is_stack else [(None, tensor)]:
            count = self._part_bytes // rows[0].nbytes
            assert count > 0
            count -= count % ROWS_TOGETHER if len(rows) > count > ROWS_TOGETHER else 0
            for first in range(0, len(rows), count):  # mostly one piece
                self._add(name, entry, first, rows[first : first + count])

    def _add(self, name: str, entry: int | None, first: int, rows: Tensor) -> None:
        if rows.nbytes > self._part_bytes - self._used:
            assert self._parts == PARTS
            self.flush()
        begin = self._part * self._part_bytes + self._used
        piece = Piece(name, entry, first, tuple(rows.shape), rows.dtype, begin, begin + rows.nbytes)
        piece.within(self._memory).copy_(rows)
        self._pieces.append(piece)
        self._used += -(-rows.nbytes // ALIGNMENT) * ALIGNMENT

    def flush(self) -> None:
        """Send what has been gathered."""
        if self._pieces:
            if self._memory.is_cuda:
                torch.cuda.current_stream(self._memory.device).synchronize()
            self._send(Bucket(self._segment, self._pieces))
            self._part, self._pieces, self._used = (self._part + 1) % self._parts, [], 0

    @abstractmethod
    def close(self) -> None:
        """Give the segment back, when every rank has read what was sent, or none reads any more."""

    def _use(self, segment: Segment, memory: Tensor, parts: int) -> None:
        self._segment, self._memory = segment, memory
        self._parts, self._part_bytes = parts, len(memory) // parts // ALIGNMENT * ALIGNMENT


class SharedBuckets(Buckets):
    """Buckets in shared memory."""

    _shared: SharedMemory | None = None

    def open(self, room: int | None = None) -> None:
        """Make the segment; /dev/shm may have no room. Reserving it takes time for each page."""
        parts, size = _parts_of(room, PART_BYTES)
        with explained():
            self._shared = make_segment(parts * size, parts * LEAST_PART_BYTES if parts > 1 else size)
        segment = SharedSegment(self._shared.name, self._shared.size)
        with segment.map(torch.device("cpu")) as memory:
            self._use(segment, memory, parts)

    def close(self) -> None:
        """Give the shared memory back."""
        if self._shared is not None:
            self._shared.unlink()
            self._shared.close()


class DeviceBuckets(Buckets):
    """Buckets in rank 0's device memory."""

    _address: int | None = None

    def __init__(self, send: Callable[[Bucket], None], device: torch.device) -> None:
        super().__init__(send)
        self._device = device

    def open(self, room: int | None = None) -> None:
        """Make the segment; the device may have no room."""
        parts, part_bytes = _parts_of(room, DEVICE_PART_BYTES)
        size = parts * part_bytes
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()  # makes the device's context this thread's
            try:
                self._address = allocate(size)
            except RuntimeError as error:
                raise RuntimeError(f"the device has no {size >> 20} MiB to pass tensors to ranks: {error}") from error
            memory = _tensor_at(self._address, size, self._device)
            self._use(DeviceSegment(handle_of(self._address), size), memory, parts)

    def close(self) -> None:
        """Free the device memory."""
        if self._address is not None:
            free(self._address)


def room_for(tensor: Tensor) -> int:
    """Return how many bytes of a segment a tensor takes at most, by itself or as a stack."""
    entries = len(tensor) if tensor.ndim > 2 else 1
    return tensor.nbytes + entries * ALIGNMENT


def _parts_of(room: int | None, part_bytes: int) -> tuple[int, int]:
    """Return how many parts a segment has, and the bytes of each; one part is enough for what it holds whole."""
    return (PARTS, part_bytes) if room is None or room > part_bytes else (1, room)


def _tensor_at(address: int, size: int, device: torch.device) -> Tensor:
    """Return device memory as a tensor, [size] uint8. Torch does not ask CUDA whose memory it is."""
    construct: Any = torch._C._construct_storage_from_data_pointer
    return torch.empty(0, dtype=torch.uint8, device=device).set_(construct(address, device, size))
