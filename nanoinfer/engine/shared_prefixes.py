"""Finds what running sequences share, so that decode attention reads a shared prefix once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from nanoinfer.runner.message import PrefixMessage, SharedRun

# What sharing costs, next to the reading that it saves (measured on an H200):
MIN_ROWS = 4  # of a run
MIN_TOKENS = 128  # of a run: each of its rows puts one more result together
MIN_SAVED = 16384  # tokens that a step need not read: for fewer, the launches take longer


def find_shared(tables: Sequence[list[int]], block_size: int) -> PrefixMessage | None:
    """Find the runs of blocks with which several block tables begin, or go on after another such run.

    tables: each row's, in the order of the rows; equal numbers mean the same block
    Returns None if sharing does not pay.
    """
    if len(tables) - len({table[0] for table in tables}) < MIN_ROWS - 1:
        return None
    order = sorted(range(len(tables)), key=tables.__getitem__)  # rows that share blocks become neighbours
    common = [0, *(_num_common(tables[row], tables[other]) for row, other in pairwise(order))]
    runs = _find_runs(common, block_size)
    saved = sum((run.rows - 1) * (run.end - run.start) for run in runs) * block_size
    return PrefixMessage(order, runs) if saved >= MIN_SAVED else None


def _num_common(table: list[int], other: list[int]) -> int:
    """Return with how many equal blocks two tables begin."""
    count = 0
    for block, other_block in zip(table, other, strict=False):
        if block != other_block:
            break
        count += 1
    return count


def _find_runs(common: list[int], block_size: int) -> list[SharedRun]:
    """Find the runs that pay, each before those that go on behind it.

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
        if (end - start) * block_size >= MIN_TOKENS:
            runs.append(SharedRun(first, stop - first, start, end))
            start = end
        pending += [(*part, start) for part in pairwise([first, *splits, stop])]
    return runs
