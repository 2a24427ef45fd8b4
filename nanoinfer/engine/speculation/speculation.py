"""Speculation: how many guesses the next decode step verifies, and what a draft model computes before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from nanoinfer.engine.decoding import Decoding
from nanoinfer.engine.sequence import Sequence
from nanoinfer.engine.speculation.budget import Budget
from nanoinfer.engine.step import Chunk, DecodeStep, Step


class Speculation:
    """What a Scheduler asks about guesses. budget: the places for them that pay"""

    def __init__(self, budget: Budget, max_guesses: int, has_draft_model: bool = False) -> None:
        """max_guesses: of a sequence, in a step; has_draft_model: one makes them"""
        self.budget = budget
        self._max_guesses, self._has_draft_model = max_guesses, has_draft_model

    def reach(self, guesses: int) -> int:
        """Return how many tokens a step with places for so many guesses may give a sequence."""
        return min(self._max_guesses, guesses) + 1

    def choose(self, decoding: Decoding) -> int:
        """Return for how many guesses the next step of these is to have places; 0: it is to be a plain one."""
        count = len(decoding.seqs)
        if any(seq.params.logits_processors is not None for seq in decoding.seqs):
            return 0  # functions get the tokens that there are, no guesses
        least = self.budget.least(count)
        if least == 0:
            return 0
        num_guided = sum(seq.params.is_guided for seq in decoding.seqs) if self.budget.counts_host else 0
        return self.budget.choose(count, num_guided) or (0 if decoding.goes_on else least)

    def begin(self, decoding: list[Sequence], guesses: int) -> tuple[int, list[Chunk]]:
        """Begin a step with places for so many guesses; 0: a plain step.

        Returns how many tokens it may give a sequence, and what a draft model has to compute before it. The draft model
        has no part in plain steps. A verifying step computes the last two tokens of a sequence; it lacks the keys of
        others only where a plain step came since the last one that verifies. At most one step is in flight.
        """
        lacking: list[Chunk] = []
        for seq in decoding if self._has_draft_model else ():
            if guesses == 0 and seq.drafted is None:
                seq.drafted = max(0, len(seq) - 2)
            elif guesses and seq.drafted is not None:
                if seq.drafted < seq.num_scheduled - 1:
                    lacking.append(Chunk(seq, seq.drafted, len(seq), is_last=False))
                seq.drafted = None
        return self.reach(guesses), lacking

    def read(
        self, guesses: int, tokens: Iterable[tuple[Sequence, list[int]]], take: Callable[[Sequence, list[int]], int]
    ) -> tuple[list[Sequence], int]:
        """Bring together the lengths of the sequences of a verifying step, and let them take its tokens.

        guesses: it had places for so many; take: appends tokens to a sequence, and returns how many it has got
        Returns the sequences that ended with the step, and how many tokens were dropped because theirs had ended.
        """
        reach, ended, held, num_dropped = self.reach(guesses), list[Sequence](), list[int](), 0
        for seq, new in tokens:
            if seq.is_finished:
                num_dropped += len(new)
                continue
            seq.num_scheduled -= reach - len(new)
            seq.num_unsure -= reach - 1
            num_taken = take(seq, new)
            num_dropped += len(new) - num_taken
            held.append(max(0, len(new) - 1))
            seq.num_accepted_tokens += max(0, num_taken - 1)
            if seq.finish_reason is not None:
                ended.append(seq)
        self.budget.note(guesses, held)
        return ended, num_dropped

    def note_host(self, step: Step, num_guided: int, seconds: float) -> None:
        """Learn how long the host was busy for a step with guided rows."""
        if isinstance(step, DecodeStep):
            self.budget.note_host(step.guesses, len(step.seqs), num_guided, seconds)

    def note_time(self, step: Step, seconds: float) -> None:
        """Learn how long a decode step has taken."""
        if isinstance(step, DecodeStep):
            self.budget.note_time(step.guesses, len(step.seqs), seconds)
