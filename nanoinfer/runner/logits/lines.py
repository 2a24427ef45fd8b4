"""Lines: which of a step's logits are drawn again for a group of rows, and for which row each is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from nanoinfer.kernels.drafting.pack import Places

Which = Tensor | slice
EACH = slice(None)  # one line for each row, in their order


class Drawn(NamedTuple):
    """What a step has drawn by temperature alone.

    first_row: the first of its rows; a plain step has a place for each row from this one on
    logits: [places, this rank's token ids]
    token_ids: [places] int32, the tokens; positions: [places] int32, where these come in their sequences
    temperatures, seeds: [rows], as for kernels.sampling.draw
    places: of a step that verified guesses; None: of another one
    has_all: as for find_lines
    """

    first_row: int
    logits: Tensor
    token_ids: Tensor
    positions: Tensor
    temperatures: Tensor
    seeds: Tensor
    places: Places | None = None
    has_all: bool = False


class Lines(NamedTuple):
    """Lines of logits.

    places: [lines] int64, where they stand in the step
    rows: [lines] int64, for which of a group's rows they are; EACH: the rows have one each
    """

    places: Tensor
    rows: Which

    def split(self, most: int) -> list[Lines]:
        """Split them into parts of so many; a plain step's are never more."""
        if isinstance(self.rows, slice) or len(self.places) <= most:
            return [self]
        return list(map(Lines, self.places.split(most), self.rows.split(most)))


def find_lines(places: Places, row_numbers: Tensor, most: int, has_all: bool) -> Lines:
    """Find the lines of a verifying step for some rows: one behind each row's last token, then those behind guesses.

    Guesses stand in the order of the rows.

    row_numbers: [n] int64, in ascending order; most: guesses of a row
    has_all: there are as many lines as the rows may have guesses, so that the host need not know these. In place of
        guesses that are not there, the first row's first line comes again
    """
    num_rows, device = len(places.first), row_numbers.device
    numbers = torch.full((num_rows,), -1, dtype=torch.int64, device=device)
    numbers[row_numbers] = own = torch.arange(len(row_numbers), device=device)
    whose = numbers[places.row_of[num_rows:]].where(places.positions[num_rows:] >= 0, -1)
    if has_all:
        count = min(len(whose), most * len(row_numbers))
        at = (whose < 0).int().argsort(stable=True)[:count]
    else:
        at = (whose >= 0).nonzero()[:, 0]
    whose = whose[at]
    behind = (num_rows + at).where(whose >= 0, row_numbers[0])
    return Lines(torch.cat([row_numbers, behind]), torch.cat([own, whose.clamp(min=0)]))


def number_lines(rows: list[int], proposed: list[int] | None) -> Iterable[tuple[int, int]]:
    """Return pairs of numbers, row after row: of a row among these, and of each of its lines, as find_lines finds them.

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
