"""RowWriter: what is written of each line, when its turn has come, and how many lines may fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nanoinfer.batch.lines.requests import LineError
from nanoinfer.batch.lines.results import encode, error_row
from nanoinfer.batch.progress import Progress


class RowWriter:
    """Writes rows in the order in which they come, or in that of their lines."""

    def __init__(
        self, write: Callable[[bytes], None], progress: Progress, keep_order: bool, max_errors: int | None
    ) -> None:
        self._write = write
        self._progress = progress
        self._keep_order = keep_order
        self._max_errors = max_errors
        self._held: dict[int, bytes] = {}  # those that have come before their turn
        self._turn = self._num_turns = 0  # the turn of the next row to be written; of the next line

    @property
    def num_held(self) -> int:
        """How many rows wait for that of an earlier line."""
        return len(self._held)

    def next_turn(self) -> int:
        """Return the turn of the next line."""
        turn, self._num_turns = self._num_turns, self._num_turns + 1
        return turn

    def put(self, turn: int, row: Mapping[str, Any]) -> None:
        """Write a row, or hold it back until all lines before have theirs."""
        if not self._keep_order:
            self._write(encode(row))
            return
        self._held[turn] = encode(row)
        while self._turn in self._held:
            self._write(self._held.pop(self._turn))
            self._turn += 1

    def fail(self, turn: int, error: LineError) -> None:
        """Write the row of a line that has failed. Raises RuntimeError for more than max_errors of them."""
        self.put(turn, error_row(error))
        self._progress.fail(error)
        count = len(self._progress.errors)
        if self._max_errors is not None and count > self._max_errors:
            raise RuntimeError(f"max_errors={self._max_errors}: {count} lines have failed; {error}")
