"""HostCopy: what device memory held, in host memory."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from nanoinfer.process.host_memory import pages
from nanoinfer.weights.pinned import BUFFER_BYTES, copy_parts


class HostCopy:
    """Room for a copy of a tensor's bytes."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Raises MemoryError if the host has no room."""
        self._device = device
        self._bytes = np.frombuffer(pages(num_bytes), dtype=np.uint8)

    def save(self, content: Tensor) -> None:
        """Copy from the device, [bytes] uint8."""

        def save_part(part: slice, buffer: Tensor) -> None:
            staged = buffer[: part.stop - part.start]
            staged.copy_(content[part], non_blocking=True)
            torch.cuda.current_stream().synchronize()
            np.copyto(self._bytes[part], staged.numpy())

        self._copy_parts(save_part)

    def restore(self, content: Tensor) -> None:
        """Copy to the device what `save` has copied."""

        def restore_part(part: slice, buffer: Tensor) -> None:
            staged = buffer[: part.stop - part.start]
            np.copyto(staged.numpy(), self._bytes[part])
            content[part].copy_(staged, non_blocking=True)

        self._copy_parts(restore_part)

    def _copy_parts(self, copy: Callable[[slice, Tensor], None]) -> None:
        edges = [*range(0, len(self._bytes), BUFFER_BYTES), len(self._bytes)]
        copy_parts([slice(*ends) for ends in pairwise(edges)], copy, len(self._bytes), self._device)
