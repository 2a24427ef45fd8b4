"""RowTable: what a rank keeps for each running sequence, in columns whose rows join, move and leave together."""

from __future__ import annotations

from array import array
from typing import Protocol

import torch
from torch import Tensor

from nanoinfer.runner.message import StepMessage
from nanoinfer.runner.transfer import upload


class HostColumn(Protocol):
    """What the host keeps for some rows."""

    def move(self, source: int, destination: int) -> None:
        """Put a row in the place of another, which has left."""
        ...

    def leave(self, num_rows: int) -> None:
        """Forget the rows from this one on."""
        ...


class RowTable:
    """Columns with a row for each running sequence, packed from row 0. num_rows: how many there are"""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.max_rows, self.device, self.num_rows = max_rows, device, 0
        self._columns: list[tuple[Tensor, int | None]] = []
        self._on_host: list[HostColumn] = []

    def column(self, dtype: torch.dtype, width: int | None = None, empty: int | None = None) -> Tensor:
        """Return a further column, [rows] or [rows, width]; empty: what an empty row has; None: any number."""
        shape = (self.max_rows,) if width is None else (self.max_rows, width)
        self._columns.append((torch.full(shape, empty or 0, dtype=dtype, device=self.device), empty))
        return self._columns[-1][0]

    def add(self, column: HostColumn) -> None:
        """Let a column of the host's move along."""
        self._on_host.append(column)

    def update(self, message: StepMessage) -> None:
        """Move rows, and empty those that have left, as the message says."""
        if message.moves:
            flat = array("i", [row for move in message.moves for row in move])
            source, destination = upload(flat, self.device).view(-1, 2).T
            for column, _ in self._columns:
                column[destination] = column[source]
            for move in message.moves:
                for own in self._on_host:
                    own.move(*move)
        if message.num_rows < self.num_rows:
            self.empty(message.num_rows)
            for own in self._on_host:
                own.leave(message.num_rows)
        self.num_rows = message.num_rows

    def empty(self, start: int = 0) -> None:
        """Empty the rows from start on."""
        for column, empty in self._columns:
            if empty is not None:
                column[start:] = empty
