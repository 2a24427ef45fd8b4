"""BlockLayout: the block sizes of several kinds of layers, such that blocks of equal bytes waste little."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

MOST_WASTE = 0.05  # of a block
MOST_BLOCK_SIZE = 4096  # whose unit is what the kernels want: there would be too many sizes to try otherwise
LEAST_UNIT = 16  # tokens that a kernel multiplies at least
# Parts of the unit, and how many blocks a prefix may have of the kind that has the fewest; one after another is tried.
TRIES = (1, (1,)), (2, (1, 2)), (1, range(1, 9)), (2, range(1, 9)), (4, range(1, 9))
MOST_TIMES_LARGER = 24  # a prefix than its least size, so that blocks waste little


class LayerKind(NamedTuple):
    """Layers that remember alike: how many pages they have in a block, and the numbers of a token in a page."""

    num_pages: int
    numbers: int


class BlockLayout(NamedTuple):
    """The tokens of a block of each kind, and of a prefix, which each kind's blocks divide.

    A block is cut into slices, and each slice into whole pages of one kind: keys of a layer, values, or both.
    """

    waste: float  # the share of a block that stays empty, of the kind where it is the largest
    prefix_size: int
    sizes: tuple[int, ...]
    slice_numbers: int
    slices: int

    @classmethod
    def of(cls, kinds: Sequence[LayerKind], prefix_size: int, sizes: Sequence[int]) -> BlockLayout:
        """Choose the slices for some block sizes."""
        pages = [kind.numbers * size for kind, size in zip(kinds, sizes, strict=True)]
        used = [kind.num_pages * page for kind, page in zip(kinds, pages, strict=True)]
        slice_numbers = math.lcm(*pages)
        slices = -(-max(used) // slice_numbers)
        return cls(1 - min(used) / (slices * slice_numbers), prefix_size, tuple(sizes), slice_numbers, slices)


def pack(kinds: Sequence[LayerKind], block_size: int, unit: int) -> BlockLayout:
    """Find the smallest prefix of at least `block_size` tokens with little waste, or else the one with the least.

    unit: each kind's blocks have a multiple of so many tokens, or of a part of it where that wastes less
    """
    if len(kinds) == 1:
        return BlockLayout.of(kinds, block_size, [block_size])
    unit *= -(-block_size // MOST_BLOCK_SIZE)
    best: BlockLayout | None = None
    for parts, most_blocks in TRIES:
        packing = _least_wasteful(kinds, block_size, max(unit // parts, LEAST_UNIT), most_blocks)
        best = packing if best is None else min(best, packing)
        if best.waste <= MOST_WASTE:
            break
    assert best is not None
    return best


def _least_wasteful(kinds: Sequence[LayerKind], block_size: int, unit: int, most_blocks: Iterable[int]) -> BlockLayout:
    """most_blocks: so many blocks, one of these numbers, a prefix may have of the kind that has the fewest."""
    first = -(-block_size // unit)
    best: BlockLayout | None = None
    for units in range(first, first * MOST_TIMES_LARGER + 1):
        sizes = [unit * divisor for divisor in _divisors(units)]
        for largest in (units // blocks * unit for blocks in most_blocks if units % blocks == 0):
            packing = BlockLayout.of(kinds, units * unit, _choose(kinds, sizes, largest))
            if packing.waste <= MOST_WASTE:
                return packing
            best = packing if best is None else min(best, packing)
    assert best is not None
    return best


def _choose(kinds: Sequence[LayerKind], sizes: Sequence[int], largest: int) -> list[int]:
    """Return for each kind the one of the sizes with which its blocks have about the same bytes as the others'.

    largest: the size for the kind with the least bytes a token
    """
    numbers = [kind.num_pages * kind.numbers for kind in kinds]
    most = largest * min(numbers)
    return [min(sizes, key=lambda size: max(size * own / most, most / (size * own))) for own in numbers]


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})
