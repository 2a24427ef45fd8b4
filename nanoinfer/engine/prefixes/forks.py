"""Forks: where the prompts that wait part from each other."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from xxhash import xxh64_intdigest

from nanoinfer.engine.prefixes.prefix_tree import NONE
from nanoinfer.engine.sequence import Sequence


class Forks:
    """Counts, for each prefix of prompts that wait, how many have it. A prefix has a multiple of `size` tokens.

    A hash stands for a prefix here. If two were equal by chance, a snapshot would be taken in vain, or not be taken.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._prefixes: dict[Sequence, list[int]] = {}  # hashes, of the shortest prefix first
        self._counts: Counter[int] = Counter()

    def add(self, seq: Sequence) -> None:
        """Count a sequence in that is to begin later."""
        hashes, digest, size = [], seq.adapter - NONE, self._size  # with another adapter, a prefix is another
        for start in range(0, seq.num_reusable // size * size, size):
            digest = xxh64_intdigest(digest.to_bytes(8, "little") + seq.content(start, start + size))
            hashes.append(digest)
        self._prefixes[seq] = hashes
        self._counts.update(hashes)

    def remove(self, seq: Sequence) -> set[int]:
        """Count a sequence out; returns behind how many of its tokens others go on otherwise than it does."""
        others = [0]  # those that have each prefix, the longest last; none has a longer one
        for digest in reversed(self._prefixes.pop(seq, [])):
            self._counts[digest] -= 1
            others.append(self._counts[digest])
            if not others[-1]:
                del self._counts[digest]
        others.reverse()
        return {self._size * (end + 1) for end, (here, longer) in enumerate(pairwise(others)) if here > longer}

    def clear(self) -> None:
        """Count all out."""
        self._prefixes.clear()
        self._counts.clear()
