"""The garbage collector looks less where there is hardly any garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEVER = 2**31 - 1  # a threshold of the collector


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
def no_full_collection() -> Iterator[None]:
    """Enclose what makes many objects that stay: the collector looks at young ones alone, not at all again and again.

    Blocks of several threads may overlap: the first one sets the threshold, and sets it back.
    """
    before = gc.get_threshold()
    try:
        gc.set_threshold(*before[:2], NEVER)
        yield
    finally:
        if before[2] != NEVER:
            gc.set_threshold(*before)


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
