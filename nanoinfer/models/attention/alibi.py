"""ALiBi (Press et al., 2021): heads that prefer near keys, each by a slope of its own."""

from __future__ import annotations


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Return the slope of each head: 2 to minus equal shares of 8.

    Where the heads are no power of two, those behind the last one have slopes between those of the heads before.
    """
    power = 1 << (heads.bit_length() - 1)
    steps = [*range(2, 2 * power + 1, 2), *range(1, 2 * power, 2)]
    return tuple(2.0 ** (-8 * step / (2 * power)) for step in steps[:heads])
