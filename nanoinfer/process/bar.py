"""Bars, and how code that has work to do counts it without knowing whether anybody watches."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any

from tqdm import tqdm

Advance = Callable[[int], object]  # told how much more is done; any thread may call it
MakeBar = Callable[[int], AbstractContextManager[Advance]]  # of how much there is to do

CELLS = 10  # of a bar whose line has no limit
NARROW = "{desc}: {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]", "{desc}: {n_fmt}/{total_fmt}{postfix}"


class Bar(tqdm):
    """A bar whose lock is for threads. tqdm's own is for processes too, and who makes it settles how they start."""

    nrows: int | None

    @staticmethod
    def format_meter(n: float, total: float, elapsed: float, ncols: int | None = None, **how: Any) -> str:
        """Return the line. A narrow one has no bar, and if need be fewer parts of postfix, rather than half of one."""
        line = tqdm.format_meter(n, total, elapsed, **how)
        if ncols is None or ncols <= 0:  # nobody tells how wide the terminal is
            return line
        if len(line) - CELLS < ncols:
            return tqdm.format_meter(n, total, elapsed, ncols, **how)
        parts = (how.pop("postfix", None) or "").split(", ")
        for form, count in product(NARROW, range(len(parts), 0, -1)):
            how.update(bar_format=form, postfix=", ".join(parts[:count]))
            line = tqdm.format_meter(n, total, elapsed, **how)
            if len(line) <= ncols:
                break
        return line[:ncols]

    def display(self, msg: str | None = None, pos: int | None = None) -> bool | None:
        """Show the line, also on a terminal whose size nobody has set. It says that it has 0 rows, too few for tqdm."""
        if self.nrows is not None and self.nrows < 1:
            self.nrows = None
        shown: bool | None = super().display(msg, pos)
        return shown


Bar.set_lock(threading.RLock())


def ignore(done: int) -> None:
    """Count nothing."""


def no_bar(total: int | None) -> AbstractContextManager[Advance]:
    """Return a context in which nobody counts."""
    return nullcontext(ignore)
