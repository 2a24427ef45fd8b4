"""What a rank keeps for its rows: all columns move together, and rows that have left are empty."""

from __future__ import annotations

import pytest
import torch

from nanoinfer.runner.message import DecodeMessage
from nanoinfer.runner.steps.row_table import RowTable


class Names:
    """A column of the host's."""

    def __init__(self, of: dict[int, str]) -> None:
        self.of = of

    def move(self, source: int, destination: int) -> None:
        self.of[destination] = self.of.pop(source)

    def leave(self, num_rows: int) -> None:
        self.of = {row: name for row, name in self.of.items() if row < num_rows}


@pytest.fixture
def table() -> RowTable:
    """Five rows of six."""
    table = RowTable(6, torch.device("cpu"))
    table.num_rows = 5
    return table


def test_a_column_begins_empty(table: RowTable) -> None:
    assert table.column(torch.int32, empty=-1).tolist() == [-1] * 6
    assert table.column(torch.float32, width=2).tolist() == [[0.0, 0.0]] * 6


def test_rows_move_in_all_columns_and_leave(table: RowTable) -> None:
    """Rows 1 and 2 have left: the last ones fill their places."""
    slots, tables, names = (
        table.column(torch.int32, empty=-1),
        table.column(torch.int64, width=2),
        Names(dict(enumerate("abcde"))),
    )
    slots[:5], tables[:5] = torch.arange(5, dtype=torch.int32), torch.arange(10).view(5, 2)
    table.add(names)
    table.update(DecodeMessage([(4, 1), (3, 2)], 3, [], 9))
    assert slots.tolist() == [0, 4, 3, -1, -1, -1]
    assert tables[:3].tolist() == [[0, 1], [8, 9], [6, 7]]
    assert names.of == {0: "a", 1: "e", 2: "d"}
    assert table.num_rows == 3


def test_a_steady_step_changes_nothing(table: RowTable) -> None:
    column, names = table.column(torch.int32, empty=-1), Names({4: "e"})
    column[:5] = 7
    table.add(names)
    table.update(DecodeMessage([], 5, [], 9))
    assert (column.tolist(), names.of) == ([7] * 5 + [-1], {4: "e"})
