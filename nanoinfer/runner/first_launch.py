"""What a process's first launch of a kernel waits for. Threads begin it early, while this process imports and reads."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from contextlib import suppress

from triton.runtime import cache

from nanoinfer.driver import call


@functools.cache
def read_triton() -> threading.Thread:
    """Let a thread hash Triton's own files, half a gigabyte, and return the thread. A process has one.

    Triton names compiled kernels by this hash, and keeps it. Without it, all threads that launch would compute it.
    """
    return _start(getattr(cache, "triton_key", lambda: None))  # other versions of Triton may have no such function


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


def _start(target: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=target, name="nanoinfer-first-launch", daemon=True)
    thread.start()
    return thread
