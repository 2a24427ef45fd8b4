"""Bars, and how code that has work to do counts it without knowing whether anybody watches."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from tqdm import tqdm

Advance = Callable[[int], object]  # told how much more is done; any thread may call it
MakeBar = Callable[[int], AbstractContextManager[Advance]]  # of how much there is to do


class Bar(tqdm):
    """A bar whose lock is for threads. tqdm's own is for processes too, and who makes it settles how they start."""


Bar.set_lock(threading.RLock())


def ignore(done: int) -> None:
    """Count nothing."""


def no_bar(total: int) -> AbstractContextManager[Advance]:
    """Return a context in which nobody counts."""
    return nullcontext(ignore)
