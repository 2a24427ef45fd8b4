"""PinnedPages: host memory that a GPU copies at full speed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nanoinfer.process.host_memory import free_bytes, pages

SPARE_BYTES = 1 << 30  # of host memory that stay free


class PinnedPages:
    """Tensors in memory of their own, [bytes] uint8 each. On the CPU, it is memory as any."""

    def __init__(self, sizes: list[int], device: torch.device) -> None:
        """Raises MemoryError or RuntimeError if the host has no room, or pins no more."""
        self._device = device
        self.tensors: list[Tensor] = []
        check_room(sum(sizes))
        try:
            for size in sizes:
                self.tensors.append(pinned(size, device))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give all back, once the device has done its copies."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        while self.tensors:
            unpin(self.tensors.pop())


def pinned(num_bytes: int, device: torch.device) -> Tensor:
    """Return zeros, [bytes] uint8, pinned for a GPU. Raises MemoryError or RuntimeError if the host has no room."""
    check_room(num_bytes)
    memory = torch.from_numpy(np.frombuffer(pages(max(num_bytes, 1)), np.uint8))[:num_bytes]
    if device.type == "cuda":
        memory.fill_(0)  # pages that are there are pinned in less time
        pin(memory, device)
    return memory


def check_room(num_bytes: int) -> None:
    """Raise MemoryError if the host has no room for so much more."""
    if (free := free_bytes()) < num_bytes + SPARE_BYTES:
        raise MemoryError(f"{free / 2**30:.1f} GiB are free, of which {SPARE_BYTES / 2**30:.1f} GiB stay so")


def pin(memory: Tensor, device: torch.device) -> None:
    """Let a GPU copy memory at full speed, if it is one. Raises RuntimeError if the host pins no more."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), len(memory), 0)))


def unpin(memory: Tensor) -> None:
    """Let memory be as any other again."""
    if memory.is_pinned():
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())))
