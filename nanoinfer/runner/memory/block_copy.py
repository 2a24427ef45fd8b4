"""Copies between the device's memory and host memory: of a block, which has slices there, by DMA, with one call."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from nanoinfer.process.driver import call

MOST_PITCH = 2**31 - 1  # bytes, between the slices of a block
HOST, DEVICE = 1, 2  # CUmemorytype


def copy_block(target: Tensor, source: Tensor) -> None:
    """Copy a block's slices, [slices, numbers of a slice]; on a GPU on the current stream, without waiting for it.

    One of the two is in pinned host memory then. Where slices are too far apart, torch puts them together first.
    """
    source, target = source.view(torch.uint8), target.view(torch.uint8)
    if not (target.is_cuda or source.is_cuda) or max(target.stride(0), source.stride(0)) > MOST_PITCH:
        target.copy_(source, non_blocking=True)
        return
    slices, num_bytes = source.shape
    copy = _Copy2D(source=_End.of(source), target=_End.of(target), width=num_bytes, height=slices)
    call("cuMemcpy2DAsync_v2", ctypes.byref(copy), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))


def pair_parts(parts: Iterable[Tensor], blocks: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut parts and blocks, each read as one run of bytes, where either ends; yields pieces at equal places.

    parts: [slices, bytes of a slice] uint8, these side by side; blocks: contiguous, of any dtype, with as many bytes at
        least
    Pieces are [slices, bytes] uint8, as copy_block takes them.
    """
    rest = torch.empty(0, dtype=torch.uint8)
    others = iter(blocks)
    for part in parts:
        slices, size = part.shape
        place, end = 0, slices * size
        while place < end:
            if not len(rest):
                rest = next(others).view(-1).view(torch.uint8)
            number, begun = divmod(place, size)
            count = 0 if begun else min(len(rest) // size, slices - number)  # so many slices are whole
            taken = count * size or min(len(rest), size - begun)
            piece = part[number : number + count] if count else part[number : number + 1, begun : begun + taken]
            yield piece, rest[:taken].view(piece.shape)
            place, rest = place + taken, rest[taken:]


class _End(ctypes.Structure):
    """One half of CUDA_MEMCPY2D."""

    _fields_ = (
        ("x", ctypes.c_size_t),
        ("y", ctypes.c_size_t),
        ("kind", ctypes.c_int),
        ("host", ctypes.c_void_p),
        ("device", ctypes.c_uint64),
        ("array", ctypes.c_void_p),
        ("pitch", ctypes.c_size_t),
    )

    @classmethod
    def of(cls, slices: Tensor) -> _End:
        """Return where slices begin, and how far apart they are."""
        if slices.is_cuda:
            return cls(kind=DEVICE, device=slices.data_ptr(), pitch=slices.stride(0))
        return cls(kind=HOST, host=slices.data_ptr(), pitch=slices.stride(0))


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (("source", _End), ("target", _End), ("width", ctypes.c_size_t), ("height", ctypes.c_size_t))
