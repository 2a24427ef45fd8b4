"""FreeBlocks: the blocks that no sequence holds, and which of them is handed out next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain


class FreeBlocks:
    """Hands out blocks that hold nothing to keep first, then fresh ones, then the least recently freed ones.

    A host's memory comes as it is touched, and fresh blocks would take all of it in time, whatever sequences need. So
    there, fresh blocks stay behind the others once enough have been handed out: `num_eager`, or twice as many as
    sequences have held at once. Then cached prefixes have at least as much room as the sequences that run.
    """

    def __init__(self, num_blocks: int, num_eager: int | None = None) -> None:
        """num_eager: so many fresh blocks are always handed out before those with content; None: all"""
        self.num_blocks = num_blocks
        self._num_eager = num_blocks if num_eager is None else num_eager
        self._num_touched = 0  # fresh blocks are handed out in their order: the others are those from this one on
        self._most_held = 0  # at once
        self._empty: dict[int, None] = {}  # they hold nothing to keep; the last is handed out first
        self._kept: OrderedDict[int, None] = OrderedDict()  # the least recently freed one first

    def __len__(self) -> int:
        return len(self._empty) + len(self._kept) + self.num_blocks - self._num_touched

    def __contains__(self, block_id: int) -> bool:
        return block_id >= self._num_touched or block_id in self._kept or block_id in self._empty

    def __iter__(self) -> Iterator[int]:
        return chain(reversed(self._empty), range(self._num_touched, self.num_blocks), self._kept)

    def hand_out(self) -> int:
        """Remove the next block, and return it. Raises KeyError if there is none."""
        if self._empty:
            return self._empty.popitem()[0]
        num_held = self._num_touched - len(self._kept) + 1
        self._most_held = max(self._most_held, num_held)
        may_touch = self._num_touched < max(self._num_eager, 2 * self._most_held)
        if self._num_touched < self.num_blocks and (may_touch or not self._kept):
            self._num_touched += 1
            return self._num_touched - 1
        return self._kept.popitem(last=False)[0]

    def remove(self, block_id: int) -> None:
        """Remove a block that is free, and whose content somebody shares."""
        del (self._kept if block_id in self._kept else self._empty)[block_id]

    def add(self, block_id: int, is_kept: bool) -> None:
        """Add a block that was handed out. is_kept: it holds something to keep"""
        (self._kept if is_kept else self._empty)[block_id] = None

    def empty(self, block_id: int) -> None:
        """Keep what a free block holds no more."""
        if self._kept.pop(block_id, self) is None:
            self._empty[block_id] = None

    def add_all(self, kept: Iterable[int]) -> None:
        """Add all blocks that are not free, whatever an interrupt has left. kept: those with something to keep"""
        held = [block_id for block_id in range(self._num_touched) if block_id not in self]
        order = dict.fromkeys([*self._kept, *held])
        having = set(kept)
        self._kept = OrderedDict.fromkeys(block_id for block_id in order if block_id in having)
        without = [block_id for block_id in order if block_id not in having]
        self._empty = dict.fromkeys([*reversed(without), *self._empty])
