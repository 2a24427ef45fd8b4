"""Calls of the CUDA driver that torch does not offer."""

from __future__ import annotations

import ctypes
from typing import Any


def call(name: str, *args: Any) -> None:
    """Call a function of the driver, on the current thread's context; raises RuntimeError with its error and code."""
    library = ctypes.CDLL("libcuda.so.1")
    if code := getattr(library, name)(*args):
        error = ctypes.c_char_p()
        library.cuGetErrorString(code, ctypes.byref(error))
        raise RuntimeError(f"{name} failed with CUDA driver error {code}: {(error.value or b'unknown error').decode()}")
