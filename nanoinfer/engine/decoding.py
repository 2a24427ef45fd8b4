"""Decoding: the running sequences that get a token from the next decode step, and the blocks that they need for it."""

from __future__ import annotations

from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.sequence import Sequence, SequenceStatus
from nanoinfer.engine.step import Chunk, DecodeStep


class Decoding:
    """Who decodes. A sequence seldom needs a block or has to leave: that is looked into when it comes to its check_at.

    seqs: those that get a token from the next step
    full: those of them that need a block for it; others may be among them that need none any more
    num_verifying: steps in flight that verify guesses
    """

    def __init__(self, block_manager: BlockManager) -> None:
        self._manager = block_manager
        self.seqs: list[Sequence] = []
        self.full: list[Sequence] = []
        self.num_verifying = 0

    def start(self, seq: Sequence) -> None:
        """Take in a sequence whose prompt is scheduled whole."""
        self.seqs.append(seq)
        self._check(seq)

    def _check(self, seq: Sequence) -> None:
        """Decide whether a sequence is in the next step, whether it needs a block, and when to look again."""
        if self.ends(seq):
            return
        if self._manager.num_needed(seq):
            self.full.append(seq)
        seq.check_at = min(self._manager.next_end(seq.num_certain), seq.end - 1)

    def ends(self, seq: Sequence) -> bool:
        """Take a sequence out of the next step if those in flight certainly bring it to its end; returns whether so."""
        if seq.num_certain + 1 < seq.end:
            return False
        seq.status = SequenceStatus.ENDING if seq.end == seq.max_len else SequenceStatus.OUTGROWN
        self.drop(seq)
        return True

    def drop(self, seq: Sequence) -> None:
        """Take a sequence out of the next step, if it is in there."""
        for seqs in (self.seqs, self.full):
            if seq in seqs:
                seqs.remove(seq)

    def clear(self) -> None:
        """Forget every sequence."""
        self.seqs.clear()
        self.full.clear()
        self.num_verifying = 0

    @property
    def goes_on(self) -> bool:
        """Whether each sequence certainly has room for the token of another plain step."""
        return self.num_verifying == 0 or all(seq.num_scheduled + 1 < seq.end for seq in self.seqs)

    @property
    def has_room(self) -> bool:
        """Whether there are blocks for a plain step."""
        return not self.full or sum(map(self._manager.num_needed, self.full)) <= self._manager.num_free

    def find_full(self, reach: int) -> bool:
        """Find the sequences that need blocks for up to so many tokens of each; returns whether there are."""
        needed = 0
        self.full.clear()
        for seq in self.seqs:
            if count := self._manager.num_needed(seq, seq.count(reach)):
                self.full.append(seq)
                needed += count
        return needed <= self._manager.num_free

    def advance(self, guesses: int, reach: int, lacking: list[Chunk]) -> DecodeStep:
        """Count the next step in, and give its sequences their blocks.

        guesses: it has places for so many; reach: it may give a sequence so many tokens; lacking: as DecodeStep has it
        """
        seqs, due, longest, append = self.seqs.copy(), [], 0, self._manager.append
        grown = [(seq, *place) for seq in self.full for place in append(seq, seq.count(reach))]
        self.full.clear()
        for seq in seqs:
            seq.num_scheduled = length = seq.num_scheduled + reach
            if length > longest:
                longest = length
            if length >= seq.check_at:
                due.append(seq)
        if guesses:
            self.num_verifying += 1
            longest = max(min(seq.num_scheduled, seq.end - 1) for seq in seqs)
            for seq in seqs:
                seq.num_unsure += reach - 1
        for seq in due:
            self._check(seq)
        return DecodeStep(seqs, grown, due, longest, guesses, lacking)
