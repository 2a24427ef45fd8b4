"""StatusLine: what a command of a minute is at, on standard error, for standard output has its figures."""

from __future__ import annotations

import sys
import time

from nanoinfer.process.standard_error import is_terminal, replace_line, say

ON_TERMINAL, ELSEWHERE = 1.0, 10.0  # seconds between two lines of one stage


class StatusLine:
    """Says which stage a command is at: on a terminal in one line, which the next replaces, elsewhere line by line.

    After a `with` block a terminal shows no line of it.
    """

    def __init__(self) -> None:
        self._is_terminal = is_terminal(sys.stderr)
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
            replace_line("")

    def _show(self, line: str) -> None:
        self._next = time.monotonic() + self._every
        if self._is_terminal:
            replace_line(line)
        else:
            say(line)
