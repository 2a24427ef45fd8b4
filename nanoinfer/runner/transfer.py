"""Between the host's memory and the device's, without waiting for either."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

_TORCH_TYPES = {"i": torch.int32, "q": torch.int64, "f": torch.float32}


def upload(values: array[int] | array[float], device: torch.device) -> Tensor:
    """A host array as a device tensor of its own type, without waiting for the device."""
    if not values:
        return torch.empty(0, dtype=_TORCH_TYPES[values.typecode], device=device)
    host = torch.frombuffer(values, dtype=_TORCH_TYPES[values.typecode])
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def upload_all(parts: list[array[int]], device: torch.device) -> list[Tensor]:
    """Several int32 arrays in one copy. Each begins at a multiple of 16 bytes, or kernels would compile anew for it."""
    packed, starts = array("i"), []
    for part in parts:
        starts.append(len(packed))
        packed += part
        packed.extend([0] * (-len(packed) % 4))
    whole = upload(packed, device)
    return [whole[start : start + len(part)] for start, part in zip(starts, parts, strict=True)]


def to_host(x: Tensor) -> Tensor:
    """A copy in host memory; from a CUDA device it has come with the stream's next event."""
    if not x.is_cuda:
        return x.clone()
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x, non_blocking=True)
