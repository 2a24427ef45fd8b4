"""What a process's first launch of a kernel waits for. A thread begins it early, while this process reads weights."""

from __future__ import annotations

import functools
import threading

from triton.runtime import cache


@functools.cache
def read_triton() -> threading.Thread:
    """Let a thread hash Triton's own files, half a gigabyte, and return the thread. A process has one.

    Triton names compiled kernels by this hash, and keeps it. Without it, all threads that launch would compute it.
    """
    key = getattr(cache, "triton_key", lambda: None)  # other versions of Triton may have no such function
    thread = threading.Thread(target=key, name="nanoinfer-first-launch", daemon=True)
    thread.start()
    return thread
