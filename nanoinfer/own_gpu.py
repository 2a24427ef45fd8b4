"""A process that we start for one GPU makes its CUDA context while it imports the rest, which takes as long."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from nanoinfer.driver import make_context

if TYPE_CHECKING:  # the import of torch is what takes long
    import torch

VISIBLE = "CUDA_VISIBLE_DEVICES"
OWN_GPU = "NANOINFER_OWN_GPU"  # the number, among those that are visible


def make_own_context() -> None:
    """Let a thread make the context, if this process was started for one GPU."""
    if (gpu := os.environ.pop(OWN_GPU, None)) is not None:
        make_context(int(gpu))


@contextmanager
def started_for(device: torch.device, visible: str | None = None) -> Iterator[None]:
    """Start processes in the block for a device.

    visible: the GPUs that they see, already when they import the main module, as CUDA_VISIBLE_DEVICES names them;
        None: those that this process sees
    """
    before = {name: os.environ.get(name) for name in (VISIBLE, OWN_GPU)}
    if visible is not None:
        os.environ[VISIBLE] = visible
    if device.type == "cuda":
        os.environ[OWN_GPU] = str(device.index)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
