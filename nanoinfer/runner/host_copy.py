"""HostCopy: what device memory held, in pinned host memory, which the device copies at full speed."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

PART_BYTES = 256 << 20
THREADS = 8  # that pin; one pins 2.4 GB/s


class HostCopy:
    """Room for a copy of a tensor's bytes. Pinning takes seconds, so the room stays for the next copy."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Raises MemoryError if the host has no room."""
        self._device = device
        try:
            self._memory = mmap.mmap(-1, num_bytes)
        except OSError as error:
            raise MemoryError(f"the host has no {num_bytes / 2**30:,.1f} GiB for the weights: {error}") from error
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._pinned: list[Tensor] = []

    def save(self, content: Tensor) -> None:
        """Copy from the device, [bytes] uint8. The first time, each part is copied while the next ones are pinned."""
        for part, source in zip(self._parts(), content.split(PART_BYTES), strict=True):
            part.copy_(source, non_blocking=True)
        torch.cuda.synchronize(self._device)

    def restore(self, content: Tensor) -> None:
        """Copy to the device what `save` has copied. The host does not wait."""
        for part, target in zip(self._pinned, content.split(PART_BYTES), strict=True):
            target.copy_(part, non_blocking=True)

    def close(self) -> None:
        """Give the memory back."""
        for part in self._pinned:
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(part.data_ptr())))
        self._pinned.clear()
        del self._whole
        self._memory.close()

    def _parts(self) -> Iterator[Tensor]:
        missing = self._whole.split(PART_BYTES)[len(self._pinned) :]
        yield from list(self._pinned)
        with ThreadPoolExecutor(THREADS) as pool:
            for part in pool.map(partial(_pin, self._device), missing):
                self._pinned.append(part)
                yield part


def _pin(device: torch.device, part: Tensor) -> Tensor:
    with torch.cuda.device(device):
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(part.data_ptr(), part.nbytes, 0)))
    return part
