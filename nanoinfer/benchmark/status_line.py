"""StatusLine: what a command of a minute is at, on standard error, for standard output has its figures."""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import suppress

ON_TERMINAL, ELSEWHERE = 1.0, 10.0  # seconds between two lines of one stage


class StatusLine:
    """Says which stage a command is at: on a terminal in one line, which the next replaces, elsewhere line by line.

    After a `with` block a terminal shows no line of it.
    """

    def __init__(self) -> None:
        self._is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._every = ON_TERMINAL if self._is_terminal else ELSEWHERE
        self._stage = ""
        self._next = 0.0

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()

    def begin(self, stage: str) -> None:
        """Say that a stage begins."""
        self._stage = stage
        self._show(stage)

    @property
    def is_due(self) -> bool:
        """Whether the last line is so old that the stage may tell more; a timed loop asks in each step."""
        return time.monotonic() >= self._next

    def tell(self, detail: str) -> None:
        """Say how far the stage is."""
        self._show(f"{self._stage}: {detail}")

    def clear(self) -> None:
        """Take the line off a terminal, so that figures get a line of their own."""
        if self._is_terminal:
            _write("\r\x1b[K")

    def _show(self, line: str) -> None:
        self._next = time.monotonic() + self._every
        self.clear()
        if self._is_terminal:
            line = line[: shutil.get_terminal_size().columns - 1]  # a line that wraps could not be replaced
        _write(line if self._is_terminal else f"{line}\n")


def _write(text: str) -> None:
    """Write to standard error, if there is one: figures of a minute must not be lost because nobody can read this."""
    with suppress(OSError):  # a full disk, or a pipe that nobody reads
        if sys.stderr is not None:
            print(text, end="", file=sys.stderr, flush=True)
