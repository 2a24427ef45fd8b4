"""Waiting: the sequences that wait, in the order in which they are to begin."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from nanoinfer.engine.sequence import Sequence

MOST_LOOKED_AT = 256  # from the first on, for one that fits
MOST_PASSES = 256  # so often others are let in before one that waits longer; then all behind it wait


class Waiting:
    """A queue that one may leave from any place. Smaller ones may pass bigger ones in it, though not for ever."""

    def __init__(self) -> None:
        self._passes: OrderedDict[Sequence, int] = OrderedDict()  # how often others have been let in before each

    def __len__(self) -> int:
        return len(self._passes)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._passes)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence behind the others."""
        self._passes[seq] = 0

    def remove(self, seq: Sequence) -> None:
        """Let a sequence leave, wherever it waits."""
        del self._passes[seq]

    def clear(self) -> None:
        """Let all leave."""
        self._passes.clear()

    @property
    def first(self) -> Sequence:
        """The one that is to begin next."""
        return next(iter(self._passes))

    def put_first(self, seq: Sequence) -> None:
        """Put a sequence before the others, except that a half-done prompt stays first.

        It would hold its blocks for nothing otherwise.
        """
        first = self.first if self._passes else seq
        self._passes.setdefault(seq, 0)
        self._passes.move_to_end(seq, last=False)
        if first.block_tables:
            self._passes.move_to_end(first, last=False)

    def put_longest_first(self) -> None:
        """Let those begin sooner that may get more tokens."""
        order = sorted(self._passes, key=lambda seq: len(seq) - seq.max_len)
        self._passes = OrderedDict((seq, self._passes[seq]) for seq in order)

    def candidates(self) -> Iterator[Sequence]:
        """Yield those that may begin now, in their order: the first ones, up to one that has been passed too often."""
        for seq, passes in islice(self._passes.items(), MOST_LOOKED_AT):
            yield seq
            if passes >= MOST_PASSES:
                return

    def let_pass(self, seq: Sequence) -> None:
        """Put one of the candidates first, with the samples of its prompt that wait right behind it."""
        if seq is self.first:
            return
        group: list[Sequence] = []
        for other in self._passes:
            if other is seq or (group and other.request_id == seq.request_id and other.sample_index > 0):
                group.append(other)
            elif group:
                break
            else:
                self._passes[other] += 1
        for other in reversed(group):
            self._passes.move_to_end(other, last=False)
