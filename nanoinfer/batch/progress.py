"""Progress: how far a job is, on standard error."""

from __future__ import annotations

import sys
import time

from nanoinfer.batch.lines.errors import Errors
from nanoinfer.batch.lines.requests import LineError
from nanoinfer.process.standard_error import is_terminal, replace_line, say

ON_TERMINAL, ELSEWHERE = 0.2, 10.0  # seconds between two lines


class Progress:
    """Counts lines and tokens, and says now and then how many there are.

    total: the lines of the input; None: nobody knows
    done: the lines that have their results, those of earlier runs included
    errors: of the lines that have failed in this run
    """

    def __init__(self, total: int | None, done: int = 0) -> None:
        """done: lines that an earlier run has done, as `skip` counts others"""
        self.total = total
        self.done = done
        self.errors = Errors()
        self._is_terminal = is_terminal(sys.stderr)
        self._every = ON_TERMINAL if self._is_terminal else ELSEWHERE
        self._new = self._tokens = 0  # of this run
        # `done`, and the number of errors, when a line was last left to stand.
        self._said: tuple[int, int] | None = None
        self.start()

    def start(self) -> None:
        """Count seconds from here on: the LLM is ready."""
        self._start = self._next = time.monotonic()

    def skip(self) -> None:
        """Count a line that an earlier run has done."""
        self.done += 1

    def add(self, tokens: int) -> None:
        """Count a line that has its result, and the tokens of it."""
        self._new += 1
        self._tokens += tokens
        self.done += 1

    def fail(self, error: LineError) -> None:
        """Count a line that has failed."""
        self._new += 1
        self.errors.add(error)

    def show(self, is_last: bool = False) -> None:
        """Print a line if it is time for one; on a terminal, in the place of the line before.

        Elsewhere, no line is printed twice: one that would say no other numbers of lines is left out.

        is_last: it is time, and a line of all errors follows, if there are some
        """
        now = time.monotonic()
        if now < self._next and not is_last:
            return
        self._next = now + self._every
        if self._is_terminal:
            replace_line("" if is_last else str(self))
        counts = self.done, len(self.errors)
        if counts != self._said and (is_last or not self._is_terminal):
            self._said = counts
            say(self)
        if is_last and len(self.errors):
            say(self.errors)

    def __str__(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        count = f"{self.done:,}" if self.total is None else f"{self.done:,} of {self.total:,}"
        parts = [f"{count} lines", f"{self._tokens / seconds:,.0f} tok/s", f"{len(self.errors):,} errors"]
        if self.total is not None and self._new:
            left = self.total - self.done - len(self.errors)
            if left:
                parts.append(f"{_clock(left * seconds / self._new)} left")
        return ", ".join(parts)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
