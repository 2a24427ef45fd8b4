"""TextScheduler: the Scheduler of an encoder, whose texts are each computed whole, and get no tokens."""

from __future__ import annotations

from nanoinfer.engine.scheduler import Scheduler
from nanoinfer.engine.sequence import SequenceStatus
from nanoinfer.engine.step import Chunk, PrefillStep


class TextScheduler(Scheduler):
    """Plans steps of whole texts, which hold no blocks. A step has room for the longest."""

    def schedule(self, in_flight: bool) -> PrefillStep | None:
        """Plan the next step; None: no text waits."""
        chunks: list[Chunk] = []
        budget = self.max_num_batched_tokens
        for seq in self.waiting:
            budget -= len(seq)
            if budget < 0:
                break
            chunks.append(Chunk(seq, 0, len(seq), is_last=True))
        for chunk in chunks:
            seq = chunk.seq
            self.waiting.remove(seq)
            self.running.append(seq)
            seq.num_scheduled, seq.status = len(seq), SequenceStatus.ENDING
        return PrefillStep(chunks, []) if chunks else None
