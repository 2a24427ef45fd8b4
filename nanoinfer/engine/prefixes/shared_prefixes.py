"""Finds what running sequences share, so that decode attention reads a shared prefix once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from nanoinfer.kernels.attention.prefixes.prefix_plan import MIN_ROWS
from nanoinfer.runner.message import PrefixMessage, SharedRun

# What sharing costs, beside the reading that it saves:
MIN_TOKENS = 128  # of a run: each of its rows puts one more result together
MIN_SAVED = 128 << 20  # bytes that a layer need not read: otherwise its launch and empty rows may cost more


@dataclass(frozen=True)
class PrefixFinder:
    """Finds shared prefixes in block tables.

    block_size: tokens in a block
    tile_rows: so many rows share what is read once
    token_bytes: of a token's keys and values, in a layer of a rank
    """

    block_size: int
    tile_rows: int
    token_bytes: int

    def find(self, tables: Sequence[list[int]]) -> PrefixMessage | None:
        """Find the runs of blocks with which several block tables begin, or go on after another such run.

        tables: each row's, in the order of the rows; equal numbers mean the same block
        Returns None if sharing does not pay.
        """
        if len(tables) - len({table[0] for table in tables}) < MIN_ROWS - 1:
            return None
        order = sorted(range(len(tables)), key=tables.__getitem__)  # rows that share blocks become neighbours
        common = [0, *(_num_common(tables[row], tables[other]) for row, other in pairwise(order))]
        runs = self._find_runs(common)
        saved = sum((run.rows - -(-run.rows // self.tile_rows)) * (run.end - run.start) for run in runs)
        return PrefixMessage(order, runs) if saved * self.block_size * self.token_bytes >= MIN_SAVED else None

    def _find_runs(self, common: list[int]) -> list[SharedRun]:
        """Find the runs of enough rows and tokens, each before those that go on behind it.

        common: for each place of the order, the number of blocks that its table shares with the one before
        """
        runs = []
        pending = [(0, len(common), 0)]  # neighbours, from place to place, and how many of their blocks are in runs
        while pending:
            first, stop, start = pending.pop()
            if stop - first < MIN_ROWS:
                continue
            end = min(common[first + 1 : stop])
            splits = [place for place in range(first + 1, stop) if common[place] == end]
            if (end - start) * self.block_size >= MIN_TOKENS:
                runs.append(SharedRun(first, stop - first, start, end))
                start = end
            pending += [(*part, start) for part in pairwise([first, *splits, stop])]
        return runs


def _num_common(table: list[int], other: list[int]) -> int:
    """Return with how many equal blocks two tables begin."""
    low, high = 0, min(len(table), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if table[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
