"""Regions: device memory at addresses that stay, while its pages go back to the driver and come again.

Captured graphs hold addresses. So weights and KV cache, which lend their memory, lie in ranges of addresses that the
process keeps (CUDA Driver API, virtual memory management). The pages behind them come and go.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nanoinfer.process.driver import call

ALIGNMENT = 256  # bytes; a tensor begins at a multiple of it, as torch's own do
STEP = 64 << 20  # bytes by which a region grows


class Region:
    """A range of a device's addresses from which tensors are taken one after another."""

    def __init__(self, device: torch.device, most: int) -> None:
        """most: bytes; the region cannot grow beyond. Addresses alone cost no memory."""
        self.device = device
        self._kind = _PageKind.of(device)
        granularity = ctypes.c_size_t()
        call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._kind), ctypes.c_int(0))
        self._granularity = granularity.value
        self._most = self._round(most)
        base = ctypes.c_uint64()
        call("cuMemAddressReserve", ctypes.byref(base), *_sizes(self._most, 0), ctypes.c_uint64(0), ctypes.c_uint64(0))
        self._base = base.value
        self._used = 0  # bytes of the tensors and the gaps between them
        self._pages: list[tuple[int, int, int]] = []  # (first byte, bytes, the driver's handle)

    @property
    def num_bytes(self) -> int:
        """The bytes of device memory that the region holds now."""
        return sum(size for _, size, _ in self._pages)

    @property
    def is_lent(self) -> bool:
        """Whether the pages are gone: nobody may touch the tensors then."""
        return self._used > self.num_bytes

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a new tensor with any content. It lives as long as the region."""
        assert not self.is_lent
        start = -(-self._used // ALIGNMENT) * ALIGNMENT
        end = start + max(math.prod(shape) * dtype.itemsize, 1)
        mapped = self.num_bytes
        if end > mapped:
            self._map(mapped, min(self._round(max(end - mapped, STEP)), self._most - mapped))
        self._used = end
        return (
            _view(self._base + start, end - start, self.device)[: math.prod(shape) * dtype.itemsize]
            .view(dtype)
            .view(shape)
        )

    def content(self) -> Tensor:
        """Return all bytes that the tensors have, [bytes] uint8."""
        return _view(self._base, self._used, self.device)

    def lend(self) -> None:
        """Give all pages back to the driver, once the device has done its work. The content is lost."""
        torch.cuda.synchronize(self.device)
        while self._pages:
            start, size, handle = self._pages.pop()
            call("cuMemUnmap", ctypes.c_uint64(self._base + start), ctypes.c_size_t(size))
            call("cuMemRelease", ctypes.c_uint64(handle))

    def take_back(self) -> None:
        """Have pages again, with any content, behind the same addresses. Raises torch.OutOfMemoryError if too few."""
        if self.is_lent:
            self.lend()  # what an interrupt may have left; makes the device's context this thread's
            self._map(0, self._round(self._used))

    def close(self) -> None:
        """Give back pages and addresses; the tensors are gone."""
        self.lend()
        if self._base:
            call("cuMemAddressFree", ctypes.c_uint64(self._base), ctypes.c_size_t(self._most))
        self._base = self._used = 0

    def _map(self, start: int, size: int) -> None:
        handle = ctypes.c_uint64()
        try:
            call(
                "cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(self._kind), ctypes.c_uint64(0)
            )
        except RuntimeError as error:
            raise torch.OutOfMemoryError(f"the device has no {size / 2**30:,.2f} GiB left: {error}") from error
        address = ctypes.c_uint64(self._base + start)
        try:
            call("cuMemMap", address, *_sizes(size, 0), handle, ctypes.c_uint64(0))
        except RuntimeError:
            call("cuMemRelease", handle)
            raise
        self._pages.append((start, size, handle.value))
        access = _Access(self._kind.location, 3)  # to read and to write
        call("cuMemSetAccess", address, ctypes.c_size_t(size), ctypes.byref(access), ctypes.c_size_t(1))

    def _round(self, size: int) -> int:
        return -(-size // self._granularity) * self._granularity


class Memory(Protocol):
    """What gives tensors of one device their memory, as a Region does."""

    @property
    def device(self) -> torch.device:
        """The tensors'."""
        ...

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a new tensor with any content."""
        ...


class FromRegion(TorchFunctionMode):
    """A context in which torch.empty takes its memory from a region, as the parameters of a model do."""

    def __init__(self, region: Memory) -> None:
        super().__init__()
        self.region = region

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See torch.overrides."""
        kwargs = kwargs or {}
        if func is not torch.empty or kwargs.get("device") not in (None, self.region.device):
            return func(*args, **kwargs)
        shape = args[0] if len(args) == 1 and not isinstance(args[0], int) else args
        return self.region.tensor(tuple(shape), kwargs.get("dtype") or torch.get_default_dtype())


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _PageKind(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )

    @classmethod
    def of(cls, device: torch.device) -> _PageKind:
        """Return the kind of pages that lie in a device's memory."""
        return cls(
            type=1, location=_Location(type=1, id=torch.cuda.current_device() if device.index is None else device.index)
        )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Bytes:
    """Memory as torch.as_tensor takes it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def _view(address: int, num_bytes: int, device: torch.device) -> Tensor:
    return torch.as_tensor(_Bytes(address, num_bytes), device=device)


def _sizes(*sizes: int) -> tuple[ctypes.c_size_t, ...]:
    return tuple(map(ctypes.c_size_t, sizes))
