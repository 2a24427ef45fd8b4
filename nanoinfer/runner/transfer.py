"""Copies between the host's memory and the device's, without waiting for either."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_TORCH_TYPES = {"i": torch.int32, "q": torch.int64, "f": torch.float32}


def upload(values: array[int] | array[float], device: torch.device) -> Tensor:
    """Return a host array as a device tensor of the array's type, without waiting for the device."""
    if not values:
        return torch.empty(0, dtype=_TORCH_TYPES[values.typecode], device=device)
    host = torch.frombuffer(values, dtype=_TORCH_TYPES[values.typecode])
    if device.type != "cuda":
        return host
    pinned = torch.empty(len(values), dtype=host.dtype, pin_memory=True)
    np.copyto(pinned.numpy(), host.numpy())  # torch would wake all its threads, which takes milliseconds
    return pinned.to(device, non_blocking=True)


def upload_all(arrays: Sequence[array[int] | npt.NDArray[np.int32]], device: torch.device) -> list[Tensor]:
    """Upload several int32 arrays in one copy. Each begins at a multiple of 16 bytes, or Triton would compile anew."""
    lens = [len(values) for values in arrays]
    starts = [*accumulate((-(-count // 4) * 4 for count in lens), initial=0)]
    host = torch.empty(starts[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    packed = host.numpy()
    for start, count, values in zip(starts, lens, arrays, strict=False):
        packed[start : start + count] = values
    whole = host.to(device, non_blocking=True)
    return [whole[start : start + count] for start, count in zip(starts, lens, strict=False)]


def to_host(x: Tensor) -> Tensor:
    """Copy to host memory; from a CUDA device the copy is complete with the stream's next event."""
    if not x.is_cuda:
        return x.clone()
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x, non_blocking=True)


def keep_for_ever(owner: object) -> None:
    """Let an object live as long as the process: behind a CUDA error PyTorch aborts when it frees pinned memory."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))
