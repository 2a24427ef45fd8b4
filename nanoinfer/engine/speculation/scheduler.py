"""SpeculatingScheduler: plans steps that may give a sequence several tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.scheduler import Scheduler
from nanoinfer.engine.sequence import Sequence, SequenceStatus
from nanoinfer.engine.speculation.ahead import Ahead
from nanoinfer.engine.speculation.budget import Budget
from nanoinfer.engine.step import Chunk, DecodeStep, Step


class SpeculatingScheduler(Scheduler):
    """A Scheduler whose decode steps may verify guesses. The device alone knows how many of them hold.

    So while such a step is in flight, a running sequence has two lengths, which reading back brings together:

    - at most: blocks are there for all tokens that steps in flight may add. num_scheduled counts these tokens
    - at least: windows keep what the first of the queries to come sees

    A sequence stays in verifying steps until it has certainly ended: the device gives a row that has ended no further
    token. A plain step, in which no row looks at its end, only comes while all its sequences certainly go on.

    While no step in flight verifies, lengths are exact, and the loops of Scheduler plan and read plain steps.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        long_from: int | None,
        budget: Budget,
        max_guesses: int,
        has_draft: bool = False,
    ) -> None:
        """budget: says how many guesses a step has places for; the others: as for Scheduler and LLM.

        has_draft: a draft model makes the guesses
        """
        super().__init__(block_manager, max_num_seqs, max_num_batched_tokens, long_from)
        self.budget = budget
        self._max_guesses, self._has_draft = max_guesses, has_draft
        self._num_verifying = 0  # steps in flight
        self._is_exact = True  # whether each Ahead is out of use, as is while Scheduler's loops plan and read

    def _start(self, seq: Sequence) -> None:
        end = seq.max_len
        if self.long_from is not None and not seq.is_long:
            end = min(end, self.long_from + 1)  # then it starts again
        # The prompt's last chunk gives the first token.
        seq.ahead = Ahead(end, self._max_guesses, num_steps=1, most_tokens=1, drafted=len(seq))
        seq.check_at = self.block_manager.next_end(len(seq))
        super()._start(seq)

    def _check(self, seq: Sequence) -> None:
        if self._is_exact:
            super()._check(seq)
        elif len(seq) + _ahead(seq).num_steps >= _ahead(seq).end:  # the steps in flight certainly take it to its end
            seq.status = SequenceStatus.ENDING
            self.decoding.remove(seq)

    def _schedule_decode(self, in_flight: bool) -> DecodeStep | None:
        guesses = self._choose_guesses()
        if guesses:
            self._become_bounded()
            if not self._find_full(guesses):
                guesses = 0  # there are not enough blocks
        if guesses == 0 and self._num_verifying == 0:
            self._become_exact()
            return super()._schedule_decode(in_flight)
        if guesses == 0 and not (self._goes_on() and self._find_full(0)):
            return None  # what is read back tells who goes on; nobody can be preempted before that
        return self._advance(guesses)

    def _choose_guesses(self) -> int:
        """Return for how many guesses the next step is to have places; 0: it is to be a plain one."""
        least = self.budget.least(len(self.decoding))
        if least == 0:
            return 0
        num_guided = sum(seq.params.is_guided for seq in self.decoding) if self.budget.counts_host else 0
        guesses = self.budget.choose(len(self.decoding), num_guided)
        return guesses or (0 if self._goes_on() else least)

    def _goes_on(self) -> bool:
        """Whether each decoding sequence certainly has room for the token of another plain step."""
        return self._is_exact or all(seq.num_scheduled + 1 < _ahead(seq).end for seq in self.decoding)

    def _become_exact(self) -> None:
        """Let Scheduler's loops go on from here: no step in flight verifies."""
        if self._is_exact:
            return
        self._is_exact = True
        self.full.clear()
        if self._has_draft:
            self._plan_draft(list(self.running), 0)
        for seq in self.running:
            if seq.status is SequenceStatus.RUNNING:
                self._check(seq)
            elif not seq.is_exhausted:  # it ends as a short sequence alone
                seq.status = SequenceStatus.OUTGROWN

    def _become_bounded(self) -> None:
        """Count for each sequence what the steps in flight, which give it one token each, bring."""
        if self._is_exact:
            self._is_exact = False
            for seq in self.running:
                own = _ahead(seq)
                own.num_steps = own.most_tokens = seq.num_scheduled - len(seq) + 1

    def _find_full(self, guesses: int) -> bool:
        """Find the sequences that need blocks for a step with places for so many guesses; returns whether there are."""
        needed = 0
        self.full.clear()
        for seq in self.decoding:
            if count := self.block_manager.num_needed(seq, _count(seq, guesses)):
                self.full.append(seq)
                needed += count
        return needed <= self.block_manager.num_free

    def _advance(self, guesses: int) -> DecodeStep | None:
        """Count the next step in, which has places for so many guesses, and give its sequences their blocks."""
        if not self.decoding:
            return None
        seqs, due, longest, append = self.decoding.copy(), [], 0, self.block_manager.append
        lacking = self._plan_draft(seqs, guesses) if self._has_draft else []
        grown = [(seq, *place) for seq in self.full for place in append(seq, _count(seq, guesses))]
        self.full.clear()
        for seq in seqs:
            own = _ahead(seq)
            seq.num_scheduled += _count(seq, guesses)
            own.most_tokens += own.reach(guesses)
            own.num_steps += 1
            if seq.num_scheduled > longest:
                longest = seq.num_scheduled
            if seq.num_scheduled >= seq.check_at:
                due.append(seq)  # it may have come that far when the step is read back
            self._check(seq)
        self._num_verifying += guesses > 0
        return DecodeStep(seqs, grown, due, longest, guesses, lacking)

    def _plan_draft(self, seqs: list[Sequence], guesses: int) -> list[Chunk]:
        """Return what a draft model has to compute before a step with places for so many guesses; 0: a plain step.

        It has no part in plain steps. A verifying step computes the last two tokens of a sequence; it lacks the keys of
        others only where a plain step came since the last one that verifies. At most one step is in flight.
        """
        lacking = []
        for seq in seqs:
            own = _ahead(seq)
            if guesses == 0 and own.drafted is None:
                own.drafted = max(0, len(seq) - 2)
            elif guesses and own.drafted is not None:
                if own.drafted < len(seq) + own.most_tokens - 2:
                    lacking.append(Chunk(seq, own.drafted, len(seq), is_last=False))
                own.drafted = None
        return lacking

    def postprocess(self, step: Step, tokens: Iterable[tuple[Sequence, int | list[int]]]) -> tuple[list[Sequence], int]:
        """Take the tokens of the oldest step in flight, as Scheduler does; a list has those that a sequence got."""
        if self._is_exact:
            return super().postprocess(step, cast(Iterable[tuple[Sequence, int]], tokens))
        self._record(step)
        ended, num_dropped = self._end_scored(step), 0
        guesses, held = step.guesses, list[int]()
        for seq, drawn in tokens:
            new = drawn if isinstance(drawn, list) else [drawn]
            if seq.is_finished:
                num_dropped += len(new)
                continue
            own = _ahead(seq)
            own.num_steps -= 1
            own.most_tokens -= own.reach(guesses)
            held.append(max(0, len(new) - 1))
            num_taken = self._take(seq, new)
            num_dropped += len(new) - num_taken
            seq.num_accepted_tokens += max(0, num_taken - 1)
            if seq.finish_reason is not None:
                ended.append(seq)
        if guesses:
            self._num_verifying -= 1
            self.budget.note(guesses, held)
        return ended, num_dropped

    def note_host(self, step: Step, num_guided: int, seconds: float) -> None:
        """Learn how long the host was busy for a step with guided rows."""
        if isinstance(step, DecodeStep):
            self.budget.note_host(step.guesses, len(step.seqs), num_guided, seconds)

    def _take(self, seq: Sequence, tokens: list[int]) -> int:
        """Append tokens, one of which may end the sequence; returns how many it has got."""
        own = _ahead(seq)
        if len(seq) >= seq.check_at:  # what fills blocks up to there has just been recorded
            seq.check_at = self.block_manager.next_end(len(seq))
        if len(seq) + len(tokens) < own.end and seq.on_token is None and seq.stop_ids.isdisjoint(tokens):
            seq.token_ids.extend(tokens)  # the usual case
        else:
            for count, token_id in enumerate(tokens, 1):
                is_ended = self._append(seq, token_id)
                if seq.on_token is not None:
                    seq.on_token()
                if is_ended or seq.finish_reason is not None:
                    return count
        if seq.status is not SequenceStatus.WAITING:  # as one that `_append` lets start again does
            seq.num_scheduled = min(len(seq) - 1 + own.most_tokens, own.end - 1)
            if seq.status is SequenceStatus.RUNNING:
                self._check(seq)
            if len(seq) == own.end and own.num_steps == 0:
                self._requeue(seq)  # as a long one
        return len(tokens)

    def _next_query(self, seq: Sequence) -> int:
        if self._is_exact or seq.status is SequenceStatus.WAITING:
            return seq.num_scheduled
        return min(seq.num_scheduled, len(seq) - 1 + _ahead(seq).num_steps)

    def abort_all(self) -> None:
        """Drop every sequence, as Scheduler does."""
        super().abort_all()
        self._num_verifying, self._is_exact = 0, True


def _ahead(seq: Sequence) -> Ahead:
    assert seq.ahead is not None  # it runs
    return seq.ahead


def _count(seq: Sequence, guesses: int) -> int:
    """Return how many further tokens of a sequence a step with places for so many guesses may compute."""
    own = _ahead(seq)
    return min(own.reach(guesses), own.end - 1 - seq.num_scheduled)
