"""Calls of the CUDA driver that torch does not offer."""

from __future__ import annotations

import ctypes
from typing import Any


def call(name: str, *args: Any) -> None:
    """Call a function of the driver, on the current thread's context; raises RuntimeError with its error code."""
    if code := getattr(ctypes.CDLL("libcuda.so.1"), name)(*args):
        raise RuntimeError(f"{name} failed with CUDA driver error {code}")
