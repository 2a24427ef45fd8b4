"""Which part a rank has: of a size, such as a matrix's rows or columns, or of tasks."""

from __future__ import annotations

from collections.abc import Sequence


def share_of(size: int, rank: int, ranks: int, unit: int = 1) -> range:
    """Return the part of a size that a rank holds: a run of whole units, behind that of the rank before.

    All ranks hold equally many units, or some of them one more. Of fewer units than ranks, several ranks hold one.
    unit: so many neighbours stay together; it divides the size. Without units, all shares are equal
    """
    units, rest = divmod(size, unit)
    assert rest == 0
    assert unit > 1 or size % ranks == 0
    first, end = (place * units // ranks for place in (rank, rank + 1))
    return range(first * unit, max(end, first + 1) * unit)


def deal(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Deal tasks of these costs to ranks, the dearest first, each to the rank with the least to do.

    Returns for each rank the indices of its tasks. Without its last one, no rank has more to do than any other.
    """
    dealt, sums = [list[int]() for _ in range(ranks)], [0] * ranks
    for task in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        rank = sums.index(min(sums))
        dealt[rank].append(task)
        sums[rank] += costs[task]
    return dealt
