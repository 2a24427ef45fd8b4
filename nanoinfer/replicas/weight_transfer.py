"""Weight transfer: a trainer's tensors reach the replicas through shared memory, of which Ray's actors have copies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from nanoinfer.parallel.buckets import SharedSegment
from nanoinfer.parallel.channel import explained, make_segment
from nanoinfer.process.interrupts import delayed_interrupt
from nanoinfer.process.torch_state import fresh_torch_state

SEGMENT_BYTES = 64 << 20
LEAST_BYTES = 1 << 16


class Shape(NamedTuple):
    """A tensor without its numbers."""

    name: str
    sizes: tuple[int, ...]
    dtype: torch.dtype


class TensorChunk(NamedTuple):
    """Some bytes of a tensor, which lie in the segment from `begin` on.

    shape: the whole tensor's
    first: of its bytes, the first that is here
    """

    shape: Shape
    first: int
    begin: int
    num_bytes: int


@contextmanager
def shared_memory(num_bytes: int | None) -> Iterator[SharedSegment]:
    """Make a segment for the block. Raises RuntimeError when /dev/shm has no room, saying why and what would help.

    num_bytes: of all tensors that will be loaded; None: nobody knows. To reserve a page takes time.
    """
    size = SEGMENT_BYTES if num_bytes is None else min(max(num_bytes, LEAST_BYTES), SEGMENT_BYTES)
    memory = None
    try:
        with delayed_interrupt(), explained():
            memory = make_segment(size, LEAST_BYTES)
        yield SharedSegment(memory.name, memory.size)
    finally:
        with delayed_interrupt():
            if memory is not None:
                memory.unlink()
                memory.close()


def write_chunks(
    tensors: Iterable[tuple[str, Tensor]], segment: SharedSegment
) -> Iterator[tuple[list[TensorChunk], bool]]:
    """Write tensors into a segment; yields what is there when there is no room for more, and in the end with True.

    The caller then lets it be read.
    """
    with fresh_torch_state():
        mapped = segment.map(torch.device("cpu"))
    with mapped as memory:
        chunks: list[TensorChunk] = []
        used = 0
        for name, tensor in tensors:
            with fresh_torch_state():
                data, shape = _bytes_of(tensor), Shape(name, tuple(tensor.shape), tensor.dtype)
            first, is_whole = 0, False
            while not is_whole:  # a tensor without numbers comes, too
                if used == len(memory):
                    yield chunks, False
                    chunks, used = [], 0
                count = min(len(data) - first, len(memory) - used)
                with fresh_torch_state():
                    memory[used : used + count].copy_(data[first : first + count])
                chunks.append(TensorChunk(shape, first, used, count))
                first, used = first + count, used + count
                is_whole = first == len(data)
            del data, tensor  # so that they can go before the next one comes
        yield chunks, True


def packed(tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[Shape, bytes]]:
    """Return tensors as bytes, which a pipe takes."""
    with fresh_torch_state():
        return [
            (Shape(name, tuple(tensor.shape), tensor.dtype), _bytes_of(tensor).cpu().numpy().tobytes())
            for name, tensor in tensors
        ]


def unpacked(pairs: Iterable[tuple[Shape, bytes]]) -> list[tuple[str, Tensor]]:
    """Return the tensors that `packed` has made bytes of."""
    return [
        (name, torch.frombuffer(bytearray(data), dtype=dtype).reshape(sizes)) for (name, sizes, dtype), data in pairs
    ]


def read_chunks(sent: Iterable[list[TensorChunk]], segment: SharedSegment) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that arrive, each when the last of its bytes is there."""
    with segment.map(torch.device("cpu")) as memory:
        for chunks in sent:
            for shape, first, begin, num_bytes in chunks:
                if first == 0:
                    tensor = torch.empty(shape.sizes, dtype=shape.dtype)
                    data = _bytes_of(tensor)
                data[first : first + num_bytes].copy_(memory[begin : begin + num_bytes])
                if first + num_bytes == len(data):
                    yield shape.name, tensor


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, [bytes] uint8; those of a contiguous one are mostly a view of it."""
    return tensor.detach().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
