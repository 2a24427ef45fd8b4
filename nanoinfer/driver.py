"""Calls of the CUDA driver that torch does not offer."""

from __future__ import annotations

import ctypes
import threading
from contextlib import suppress
from typing import Any


def call(name: str, *args: Any) -> None:
    """Call a function of the driver, on the current thread's context; raises RuntimeError with its error and code."""
    library = ctypes.CDLL("libcuda.so.1")
    if code := getattr(library, name)(*args):
        error = ctypes.c_char_p()
        library.cuGetErrorString(code, ctypes.byref(error))
        raise RuntimeError(f"{name} failed with CUDA driver error {code}: {(error.value or b'unknown error').decode()}")


def make_context(device: int) -> threading.Thread:
    """Let a thread make the CUDA context that PyTorch will use, and return the thread.

    PyTorch's own first call makes it, too, but holds the GIL meanwhile, and it tells of errors.

    device: its number
    """

    def make() -> None:
        with suppress(OSError, RuntimeError):
            call("cuInit", 0)
            call("cuDevicePrimaryCtxRetain", ctypes.byref(ctypes.c_void_p()), device)

    thread = threading.Thread(target=make, name="nanoinfer-context", daemon=True)
    thread.start()
    return thread
