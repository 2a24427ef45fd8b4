"""Scheduler: which sequences run in the next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.sequence import Sequence, SequenceStatus


@dataclass(frozen=True)
class Chunk:
    """Tokens `start` to `end` of one sequence, to be prefilled in one step."""

    seq: Sequence
    start: int
    end: int
    is_last: bool  # the sequence's first new token is sampled from it


@dataclass(frozen=True)
class PrefillStep:
    """A step that computes prompts, or chunks of them."""

    chunks: list[Chunk]

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model."""
        return sum(chunk.end - chunk.start for chunk in self.chunks)


@dataclass(frozen=True)
class DecodeStep:
    """A step that gives every sequence in it one more token."""

    seqs: list[Sequence]
    grown: list[Sequence]  # those whose block table got a block for this step

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model."""
        return len(self.seqs)


Step = PrefillStep | DecodeStep


class Scheduler:
    """First come, first served: waiting prompts before running sequences, the newest preempted first.

    `schedule` plans a step from lengths alone, so it may be called again before the tokens of the last step are
    known; `postprocess` takes each step's tokens, in the order of the steps.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.eos_token_ids = eos_token_ids
        self.waiting: deque[Sequence] = deque()
        self.running: deque[Sequence] = deque()
        self.num_preemptions = 0

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence behind the others."""
        self.waiting.append(seq)

    @property
    def is_finished(self) -> bool:
        """Whether every sequence has its last token."""
        return not (self.waiting or self.running)

    def schedule(self, in_flight: bool) -> Step | None:
        """Plan the next step; None when nothing can run before what is in flight has been postprocessed.

        in_flight: whether there are scheduled steps whose tokens are not known yet
        """
        return self._schedule_prefill() or self._schedule_decode(in_flight)

    def _schedule_prefill(self) -> PrefillStep | None:
        chunks: list[Chunk] = []
        budget = self.max_num_batched_tokens
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            if not seq.block_table:
                num_cached = self.block_manager.allocate(seq)
                if num_cached is None:
                    break
                seq.num_scheduled = seq.num_computed = num_cached
            start = seq.num_scheduled
            end = min(len(seq), start + budget)
            chunks.append(Chunk(seq, start, end, is_last=end == len(seq)))
            seq.num_scheduled = end
            budget -= end - start
            if end == len(seq):
                seq.status = SequenceStatus.RUNNING
                self.running.append(self.waiting.popleft())
        return PrefillStep(chunks) if chunks else None

    def _schedule_decode(self, in_flight: bool) -> DecodeStep | None:
        seqs = [seq for seq in self.running if not seq.is_exhausted]
        grown = [seq for seq in seqs if self.block_manager.needs_block(seq)]
        while len(grown) > self.block_manager.num_free:
            if in_flight:
                return None  # a preempted sequence starts again from its tokens: they must be known
            if self._preempt(seqs.pop()) is grown[-1]:
                grown.pop()
        if not seqs:
            return None
        for seq in grown:
            self.block_manager.append(seq)
        for seq in seqs:
            seq.num_scheduled += 1
        return DecodeStep(seqs, grown)

    def _preempt(self, seq: Sequence) -> Sequence:
        assert seq is self.running[-1]
        self.running.pop()
        self.block_manager.free(seq)
        seq.num_scheduled = seq.num_computed = 0
        seq.status = SequenceStatus.WAITING
        self.waiting.appendleft(seq)
        self.num_preemptions += 1
        return seq

    def postprocess(self, step: Step, tokens: Iterable[tuple[Sequence, int]]) -> list[Sequence]:
        """Take what the oldest step in flight sampled, in any order; returns the sequences that ended with it."""
        if isinstance(step, PrefillStep):
            for chunk in step.chunks:
                if not chunk.seq.is_finished:
                    self._advance(chunk.seq, chunk.end)
        else:
            for seq in step.seqs:
                if not seq.is_finished:
                    self._advance(seq, seq.num_computed + 1)
        return [seq for seq, token_id in tokens if not seq.is_finished and self._append(seq, token_id)]

    def _advance(self, seq: Sequence, num_computed: int) -> None:
        self.block_manager.record(seq, seq.num_computed, num_computed)
        seq.num_computed = num_computed

    def _append(self, seq: Sequence, token_id: int) -> bool:
        seq.token_ids.append(token_id)
        ended = len(seq) >= seq.max_len or (token_id in self.eos_token_ids and not seq.ignore_eos)
        if ended:
            # A step in flight may still compute the token after an end-of-sequence token. Its write lands before
            # that of the block's next owner, whose step is launched later.
            seq.status = SequenceStatus.FINISHED
            self.running.remove(seq)
            self.block_manager.free(seq)
        return ended

    def abort_all(self) -> None:
        """Forget every sequence, those in flight included, and take back their blocks."""
        for seq in (*self.waiting, *self.running):
            self.block_manager.free(seq)
            seq.status = SequenceStatus.FINISHED
        self.waiting.clear()
        self.running.clear()
