"""Lines: which of a step's logits a group of rows draws from, and for which row each is."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import NamedTuple

from torch import Tensor

from nanoinfer.kernels.drafting.pack import Places

Which = Tensor | slice
EACH = slice(None)  # one line for each row, in their order


class StepLines(NamedTuple):
    """All lines of a step's logits, behind each of which a token is drawn.

    first_row: the first of its rows; a plain step has a place for each row from this one on
    logits: [places, this rank's token ids]
    positions: [places] int32, where the drawn tokens come in their sequences
    temperatures, seeds: [rows], as for kernels.sampling.draw
    places: of a step that verified guesses; None: of another one
    raw: the model's logits, where `logits` are changed ones; None: they are the model's
    has_all: the host does not know how many guesses rows have, and takes as many lines as there may be
    """

    first_row: int
    logits: Tensor
    positions: Tensor
    temperatures: Tensor
    seeds: Tensor
    places: Places | None = None
    has_all: bool = False
    raw: Tensor | None = None

    @property
    def how(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The logits, temperatures, seeds and positions of all lines."""
        if self.places is None:
            return self.logits, self.temperatures, self.seeds, self.positions
        rows = self.places.row_of
        temperatures, seeds = self.temperatures.index_select(0, rows), self.seeds.index_select(0, rows)
        return self.logits, temperatures, seeds, self.positions


class Lines(NamedTuple):
    """Lines of logits; of a verifying step, as kernels.drafting.lines finds them.

    places: [lines] int64, where they stand in the step
    rows: [lines] int64, for which of a group's rows they are; EACH: the rows have one each
    masks: [lines, words] int32, as for kernels.sampling.masks; None: the rows are not guided
    """

    places: Tensor
    rows: Which
    masks: Tensor | None = None

    def split(self, most: int) -> list[Lines]:
        """Split them into parts of so many; a plain step's are never more."""
        if isinstance(self.rows, slice) or len(self.places) <= most:
            return [self]
        masks = repeat(None) if self.masks is None else self.masks.split(most)
        return list(map(Lines, self.places.split(most), self.rows.split(most), masks))


def number_lines(rows: list[int], proposed: list[int] | None) -> Iterable[tuple[int, int]]:
    """Return pairs of numbers, row after row: of a row among these, and of each of its lines, as they come.

    proposed: how many guesses each row of the step had; None: each row has one line
    """
    if proposed is None:
        return zip(range(len(rows)), range(len(rows)), strict=True)
    numbered, behind = list[tuple[int, int]](), len(rows)
    for number, row in enumerate(rows):
        end = behind + proposed[row]
        numbered += [(number, line) for line in (number, *range(behind, end))]
        behind = end
    return numbered
