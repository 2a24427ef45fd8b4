"""HostCopy: what device memory held, in host memory.

Pinning takes half a second for each GiB. So only small buffers are pinned, and threads copy between them and the rest.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

BUFFER_BYTES = 16 << 20
NUM_THREADS = 16  # each with a pinned buffer: while some wait for the device, others copy


class HostCopy:
    """Room for a copy of a tensor's bytes."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Raises MemoryError if the host has no room."""
        self._device = device
        try:
            memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"the host has no {num_bytes / 2**30:,.1f} GiB: {error}") from error
        with suppress(OSError):  # not every kernel has huge pages, which take a fifth of the time at the first save
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(memory, dtype=np.uint8)

    def save(self, content: Tensor) -> None:
        """Copy from the device, [bytes] uint8."""

        def save_part(part: slice, buffer: Tensor) -> None:
            buffer.copy_(content[part], non_blocking=True)
            torch.cuda.current_stream().synchronize()
            np.copyto(self._bytes[part], buffer.numpy())

        self._for_all_parts(save_part)

    def restore(self, content: Tensor) -> None:
        """Copy to the device what `save` has copied."""

        def restore_part(part: slice, buffer: Tensor) -> None:
            np.copyto(buffer.numpy(), self._bytes[part])
            content[part].copy_(buffer, non_blocking=True)
            torch.cuda.current_stream().synchronize()

        self._for_all_parts(restore_part)

    def _for_all_parts(self, copy: Callable[[slice, Tensor], None]) -> None:
        """Call `copy` with each part of the bytes and a pinned buffer of its size, on several threads."""
        edges = [*range(0, len(self._bytes), BUFFER_BYTES), len(self._bytes)]
        parts = [slice(start, end) for start, end in pairwise(edges)]
        torch.cuda.current_stream(self._device).synchronize()  # the threads have streams of their own

        def work(thread: int) -> None:
            with torch.inference_mode(), torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream()):
                buffer = torch.empty(min(BUFFER_BYTES, len(self._bytes)), dtype=torch.uint8, pin_memory=True)
                for part in parts[thread::NUM_THREADS]:
                    copy(part, buffer[: part.stop - part.start])

        with ThreadPoolExecutor(NUM_THREADS) as pool:
            list(pool.map(work, range(min(NUM_THREADS, len(parts)))))
