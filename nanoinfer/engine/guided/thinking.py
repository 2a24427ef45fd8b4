"""Thinking: structured outputs that begin behind a thought."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from nanoinfer.thought import Thought

if TYPE_CHECKING:
    from llguidance import LLMatcher


class AnswerMatcher:
    """A matcher of the answer behind a thought. While the thought is open, it takes any token.

    It has those methods of an LLMatcher that Matchers use while a thought is read. No end of sequence comes before the
    answer.

    form: the LLMatcher of the answer; copies share it until the thought is closed
    """

    def __init__(self, form: LLMatcher, thought: Thought, ends: frozenset[int]) -> None:
        """ends: the tokens that end a sequence"""
        self.form = form
        self._thought, self._ends = thought, ends
        self._opening = () if thought.is_open else thought.opening  # tokens that are still to come
        self._newest: tuple[int, ...] = ()  # tokens of the thought, as many as may close it
        self.is_thinking = True

    def deep_copy(self) -> AnswerMatcher:
        """Return a matcher that has read the same."""
        copy = AnswerMatcher(self.form, self._thought, self._ends)
        copy._opening, copy._newest, copy.is_thinking = self._opening, self._newest, self.is_thinking
        if not self.is_thinking:
            copy.form = self.form.deep_copy()
        return copy

    def consume_token(self, token_id: int) -> bool:
        """Read a token; returns whether it may come."""
        if not self.is_thinking:
            return bool(self.form.consume_token(token_id))
        if self._opening:
            may_come, self._opening = token_id == self._opening[0], self._opening[1:]
            return may_come
        closing = self._thought.closing
        self._newest = (*self._newest, token_id)[-len(closing) :]
        if self._newest == closing:
            self.is_thinking, self.form = False, self.form.deep_copy()
        return True

    def fill(self, mask: npt.NDArray[np.uint32]) -> None:
        """Write the mask of the next token of the thought."""
        mask[:] = 0 if self._opening else ~np.uint32(0)
        for token_id in self._opening[:1]:
            mask[token_id // 32] |= np.uint32(1 << token_id % 32)
        for token_id in () if self._opening else self._ends:
            mask[token_id // 32] &= ~np.uint32(1 << token_id % 32)

    def is_stopped(self) -> bool:
        """Whether the text can only end."""
        return not self.is_thinking and bool(self.form.is_stopped())
