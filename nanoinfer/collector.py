"""The garbage collector looks less where there is hardly any garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Enclose what makes many objects and hardly any garbage, such as imports."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def frozen() -> Iterator[None]:
    """Let the collector look, in the block, at newer objects alone. At its exit a process must collect the others, too.

    For a process of our own: what is garbage before the block stays.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
