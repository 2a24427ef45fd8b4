"""Which part of a size a rank holds: of heads, of a matrix's rows or columns."""

from __future__ import annotations


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
