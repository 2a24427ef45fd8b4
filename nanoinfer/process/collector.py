"""The garbage collector looks less where there is hardly any garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEVER = 2**31 - 1  # a threshold of the collector
MANY = 50_000  # young objects: of texts that are read, looking at each 700 took a quarter of the host's time


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
    """Enclose what makes many objects that stay: the collector looks at many young ones at once, and never at all.

    Blocks of several threads may overlap: the first one sets the threshold, and sets it back.
    """
    before = gc.get_threshold()
    try:
        gc.set_threshold(max(before[0], MANY) if before[0] else 0, before[1], NEVER)
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
