"""Memory of a device that other ranks open, in processes of their own, to read and write it over NVLink or PCIe.

Ranks open it by CUDA's interprocess memory handles (CUDA Driver API, "Unified Addressing" and "Memory Management"),
called through ctypes. PyTorch shares memory too, but keeps the shared memory until the process ends.
"""

from __future__ import annotations

import ctypes
import uuid

import torch
from torch import Tensor

from nanoinfer.process.driver import call

GRANULARITY = 2 << 20  # CUDA shares whole pages, and ours must hold nobody else's memory
LAZY_ENABLE_PEER_ACCESS = 1


def allocate(num_bytes: int) -> int:
    """Allocate memory that can be shared, on the current device; returns its address."""
    address = ctypes.c_uint64()
    call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(-(-num_bytes // GRANULARITY) * GRANULARITY))
    return address.value


def free(address: int) -> None:
    """Free what `allocate` has returned, once no other rank has it open."""
    call("cuMemFree_v2", ctypes.c_uint64(address))


def handle_of(address: int) -> bytes:
    """Return the handle by which other processes open what `allocate` has returned."""
    handle = _Handle()
    call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
    return bytes(handle.reserved)


def open_handle(handle: bytes) -> int:
    """Return the address that another rank's memory has on the current device; raises RuntimeError if CUDA refuses."""
    address = ctypes.c_uint64()
    copy = _Handle.from_buffer_copy(handle)
    call("cuIpcOpenMemHandle_v2", ctypes.byref(address), copy, ctypes.c_uint(LAZY_ENABLE_PEER_ACCESS))
    return address.value


def close_handle(address: int) -> None:
    """Close what `open_handle` has returned, before its rank frees it."""
    call("cuIpcCloseMemHandle", ctypes.c_uint64(address))


def uuid_of(device: int) -> Tensor:
    """Return what identifies a GPU among those of all processes, [16] uint8."""
    name = str(torch.cuda.get_device_properties(device).uuid)
    return torch.tensor(list(uuid.UUID(name).bytes), dtype=torch.uint8)


def can_reach_peers(device: int, uuids: Tensor) -> bool:
    """Whether a GPU can read and write the memory of every other rank's, which this process must see.

    uuids: of the ranks' GPUs, [ranks, 16] uint8; each process may count the GPUs in an order of its own
    """
    visible = {tuple(uuid_of(number).tolist()): number for number in range(torch.cuda.device_count())}
    devices = [visible.get(tuple(each)) for each in uuids.tolist()]
    return all(
        peer is not None and torch.cuda.can_device_access_peer(device, peer) for peer in devices if peer != device
    )


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * 64),)
