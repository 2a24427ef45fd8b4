"""Speculation: how many guesses the next decode step verifies, and what a draft model computes before it."""

from __future__ import annotations

from collections.abc import Callable

from nanoinfer.engine.sequence import Sequence
from nanoinfer.engine.speculation.budget import Budget
from nanoinfer.engine.step import Chunk, DecodeStep, Step


class Speculation:
    """What a Scheduler asks about guesses. budget: the places for them that pay"""

    def __init__(self, budget: Budget, max_guesses: int, has_draft: bool = False) -> None:
        """max_guesses: of a sequence, in a step; has_draft: a draft model makes them"""
        self.budget = budget
        self._max_guesses, self._has_draft = max_guesses, has_draft

    def reach(self, guesses: int) -> int:
        """Return how many tokens a step with places for so many guesses may give a sequence."""
        return min(self._max_guesses, guesses) + 1

    def choose(self, decoding: list[Sequence], may_be_plain: Callable[[], bool]) -> int:
        """Return for how many guesses the next step of these sequences is to have places; 0: it is to be a plain one.

        may_be_plain: tells whether that is possible now
        """
        least = self.budget.least(len(decoding))
        if least == 0:
            return 0
        num_guided = sum(seq.params.is_guided for seq in decoding) if self.budget.counts_host else 0
        return self.budget.choose(len(decoding), num_guided) or (0 if may_be_plain() else least)

    def begin(self, decoding: list[Sequence], guesses: int) -> tuple[int, list[Chunk]]:
        """Begin a step with places for so many guesses; 0: a plain step.

        Returns how many tokens it may give a sequence, and what a draft model has to compute before it. The draft model
        has no part in plain steps. A verifying step computes the last two tokens of a sequence; it lacks the keys of
        others only where a plain step came since the last one that verifies. At most one step is in flight.
        """
        lacking: list[Chunk] = []
        for seq in decoding if self._has_draft else ():
            if guesses == 0 and seq.drafted is None:
                seq.drafted = max(0, len(seq) - 2)
            elif guesses and seq.drafted is not None:
                if seq.drafted < seq.num_scheduled - 1:
                    lacking.append(Chunk(seq, seq.drafted, len(seq), is_last=False))
                seq.drafted = None
        return self.reach(guesses), lacking

    def note_host(self, step: Step, num_guided: int, seconds: float) -> None:
        """Learn how long the host was busy for a step with guided rows."""
        if isinstance(step, DecodeStep):
            self.budget.note_host(step.guesses, len(step.seqs), num_guided, seconds)
