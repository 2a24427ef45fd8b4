"""Ahead: how far the steps in flight may take a sequence whose guesses are verified."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Ahead:
    """What steps in flight may bring a running sequence: at least a token each, and at most `most_tokens` in all.

    end: the sequence has at most so many tokens before it ends or starts again as a long one
    most_guesses: in a step
    drafted: a draft model has the keys of so many first tokens; None: of all but the last two
    """

    end: int
    most_guesses: int
    num_steps: int = 0
    most_tokens: int = 0
    drafted: int | None = None

    def reach(self, guesses: int) -> int:
        """Return how many tokens a step with places for so many guesses may give the sequence."""
        return min(self.most_guesses, guesses) + 1
