"""Drafter: what proposes guesses, and the texts that it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowTexts:
    """The texts of a step's rows, on the device.

    tokens: [slots, max_model_len] int32, a text in each slot; lengths: [slots] int32
    members: [groups, 16] int32, the slots of a group's texts; -1: none
    slots: [rows] int32, of each row's own text; -1: an empty row
    groups: [rows] int32; -1: a row without a group
    """

    tokens: Tensor
    lengths: Tensor
    members: Tensor
    slots: Tensor
    groups: Tensor


class Drafter(Protocol):
    """Proposes tokens that may follow the rows' texts. A wrong guess costs time and changes no token.

    Of several ranks, rank 0 alone asks it: the others take those guesses.
    """

    def propose(self, rows: RowTexts, most: int) -> tuple[Tensor, Tensor]:
        """Return guesses for each row, [rows, most] int32, and how many there are, [rows] int32, on the texts' device.

        On CUDA a graph records all of it, so its launches depend on shapes alone. Empty rows may get anything. A number
        that is no token id ends its row's guesses.
        """
        ...


class AtRankZero:
    """Stands for a Drafter on the other ranks, which take rank 0's guesses: it may keep state, and needs no copies."""

    def propose(self, rows: RowTexts, most: int) -> tuple[Tensor, Tensor]:
        """Nobody asks it."""
        raise AssertionError("rank 0 guesses")
