"""What a process's first launch of a kernel waits for. Threads begin it early, while the process imports and reads."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from importlib import import_module
from typing import TYPE_CHECKING

from nanoinfer.process.driver import call
from nanoinfer.process.environment import changed_environment

if TYPE_CHECKING:  # its import takes long, and here comes before
    import torch

VISIBLE = "CUDA_VISIBLE_DEVICES"
OWN_GPU = "NANOINFER_OWN_GPU"  # its number, among those that are visible


@functools.cache
def read_triton() -> threading.Thread:
    """Let a thread hash Triton's own files, half a gigabyte, and build its driver. A process has one; returns it.

    Triton names compiled kernels by this hash, and keeps it. Without it, all threads that launch would compute it. The
    driver is a C module that a first start compiles, and Triton finds on the disk from then on.
    """
    from triton.runtime import cache  # here, for processes on the CPU need no Triton before torch

    def read() -> None:
        getattr(cache, "triton_key", lambda: None)()  # other versions of Triton may have no such function
        with suppress(Exception):  # at the first launch, Triton tells of errors
            import_module("triton.backends.nvidia.driver").CudaUtils()

    return _start(read)


def make_context(device: int) -> threading.Thread:
    """Let a thread make the CUDA context that PyTorch will use, and return the thread.

    PyTorch's own first call makes it, too, but holds the GIL meanwhile, and it tells of errors.

    device: its number
    """

    def make() -> None:
        with suppress(OSError, RuntimeError):
            call("cuInit", 0)
            call("cuDevicePrimaryCtxRetain", ctypes.byref(ctypes.c_void_p()), device)

    return _start(make)


def prepare(device: int) -> None:
    """Make the context of a GPU, and read Triton."""
    make_context(device)
    read_triton()


def started_for(device: torch.device, visible: str | None = None) -> AbstractContextManager[None]:
    """Return a context in which processes start for a device: if it is a GPU, they call `prepare` while they import.

    visible: the GPUs that they see, already when they import the main module, as CUDA_VISIBLE_DEVICES names them;
        None: those that this process sees
    """
    theirs = {OWN_GPU: str(device.index)} if device.type == "cuda" else {}
    if visible is not None:
        theirs[VISIBLE] = visible
    return changed_environment(theirs)


def prepare_own() -> None:
    """If this process was started for a GPU, call `prepare`, and share kernels with the processes started beside it."""
    if (gpu := os.environ.pop(OWN_GPU, None)) is not None:
        prepare(int(gpu))
        from nanoinfer.process.compile_once import compile_once  # here, as above

        compile_once()


def _start(target: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=target, name="nanoinfer-first-launch", daemon=True)
    thread.start()
    return thread
