"""Matchers: how far the texts of guided sequences have come in their grammars, and which tokens may follow."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nanoinfer.engine.guided.thinking import AnswerMatcher
from nanoinfer.engine.sequence import FinishReason, Sequence
from nanoinfer.grammar.grammar import COPIES, NUM_THREADS, Grammar, error_of
from nanoinfer.runner.message import MaskMessage

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

    Matcher = LLMatcher | AnswerMatcher

Mask = npt.NDArray[np.uint32]  # one token's; bit i % 32 of word i // 32 is token i's
ALL = -1  # 32 tokens that may all be drawn
END_NAMED = "its grammar names an end-of-sequence token, which ends the text here, before its end: name it last"


@dataclass(slots=True)
class Followed:
    """How far a sequence has come in its grammar.

    matcher: has read the last known token
    lock: the number of the lock that it shares with others, see Grammar
    most: the step in flight gives the text at most so many tokens: one, and its guesses as far as these may hold and
        the text goes on behind them
    ahead: a copy of the matcher that has read those guesses, too; None: there are none, or the text ends with the next.
        An error that it found holds only if the text comes as far
    """

    matcher: Matcher
    lock: int
    most: int = 1
    ahead: Matcher | None = None

    def begin(self) -> None:
        """Forget the guesses of the step before."""
        self.most, self.ahead = 1, None

    def read_ahead(self, guess: int) -> bool:
        """Let the copy read a guess that the grammar allows; returns whether the text goes on behind it."""
        self.ahead = self.ahead or self.matcher.deep_copy()
        self.ahead.consume_token(guess)
        if self.ahead.is_stopped():
            self.ahead = None
            return False
        self.most += 1
        return True

    @property
    def newest(self) -> Matcher:
        """What has read the most."""
        return self.ahead or self.matcher


class Matchers:
    """The matchers of each guided sequence that has not ended. A preempted sequence keeps its own."""

    def __init__(self) -> None:
        self._followed: dict[Sequence, Followed] = {}
        self._num_words = 0  # of a mask
        self._executor: LLExecutor | None = None  # its threads make masks side by side, mostly without Python's lock

    def add(self, seq: Sequence, grammar: Grammar) -> None:
        """Let a sequence that has generated nothing follow a grammar."""
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(NUM_THREADS)
        self._num_words = grammar.num_words
        matcher, lock = grammar.matcher()
        guide: Matcher = matcher
        if (thought := seq.params.thought) is not None and thought.has_form:
            guide = AnswerMatcher(matcher, thought, grammar.eos_token_ids)
        self._followed[seq] = Followed(guide, lock)

    def drop(self, seq: Sequence) -> None:
        """Forget a sequence, guided or not, that has ended."""
        self._followed.pop(seq, None)

    def clear(self) -> None:
        """Forget every sequence."""
        self._followed.clear()

    def guided(self, seqs: list[Sequence]) -> list[Sequence]:
        """Return the guided ones among the sequences, in their order."""
        return [seq for seq in seqs if seq in self._followed] if self._followed else []

    def read(self, seqs: list[Sequence], tokens: list[Any]) -> int:
        """Read the tokens that a step has drawn for its sequences, before these get them; tokens: as Draws has them.

        Takes those out of a list that stand behind the end of the text; returns how many. A sequence that ended before
        has no matcher: the tokens that the step has computed for it do not count.
        """
        num_behind = 0  # an end
        for place, seq in enumerate(seqs):
            if seq not in self._followed:
                continue
            new, followed = tokens[place], self._followed[seq]
            if isinstance(new, list):
                num_behind += len(new[followed.most :])
                del new[followed.most :]
            else:
                new = [new]
            if followed.ahead is not None and len(new) == followed.most:
                followed.matcher, new = followed.ahead, new[-1:]
            followed.ahead = None
            for token in new:
                if token not in seq.stop_ids:
                    followed.matcher.consume_token(token)
            if isinstance(followed.matcher, AnswerMatcher) and not followed.matcher.is_thinking:
                followed.matcher = followed.matcher.form
        return num_behind

    def end_of(self, seq: Sequence) -> tuple[FinishReason, str | None] | None:
        """Return why a sequence ends with the tokens that were read, with what is wrong; None: it goes on."""
        if seq not in self._followed:
            return None
        matcher = self._followed[seq].matcher
        if seq.is_finished:
            self.drop(seq)
        if isinstance(matcher, AnswerMatcher):  # the thought is open
            return None
        if matcher.is_error():  # perhaps since its last mask, which then allowed an end
            return "error", f"structured_outputs: {error_of(matcher)}"
        if seq.ended_by_token and seq.stop_reason is None and not _is_whole(matcher, seq.token_ids[-1]):
            return "error", f"structured_outputs: {END_NAMED}"
        return ("stop", None) if matcher.is_stopped() and seq.finish_reason != "stop" else None

    def masks(self, seqs: list[Sequence], read_guesses: Callable[[], list[list[int]]]) -> MaskMessage:
        """Make the masks of the sequences' next tokens, and of those behind their guesses.

        read_guesses: waits for the guesses, and returns those of each sequence; the first masks are made before

        All tokens are allowed where a sequence has ended meanwhile, and behind a guess that cannot hold.
        """
        going = [place for place, seq in enumerate(seqs) if seq in self._followed]
        going.sort(key=lambda place: self._followed[seqs[place]].lock)  # neighbours mostly get the same thread
        for place in going:
            self._followed[seqs[place]].begin()
        words, at = self._blank(len(seqs)), list(range(len(seqs)))
        self._fill(words, [(seqs[place], at[place]) for place in going], 0)
        guesses = read_guesses()
        counts = list(map(len, guesses))
        firsts, behind, masks = list(accumulate(counts, initial=0)), self._blank(sum(counts)), words
        for level in range(max(counts, default=0)):
            going = [
                place
                for place in going
                if level < counts[place] and self._goes_on(seqs[place], guesses[place][level], masks, at[place])
            ]
            masks, at = behind, [first + level for first in firsts]
            self._fill(masks, [(seqs[place], at[place]) for place in going], level + 1)
        return MaskMessage(counts, words, behind)

    def _blank(self, count: int) -> array[int]:
        """Return so many masks that allow all."""
        return array("i", [ALL]) * (count * self._num_words)

    def _goes_on(self, seq: Sequence, guess: int, masks: array[int], place: int) -> bool:
        """Let a sequence's copy read a guess; returns whether it may hold, and the text goes on behind it.

        masks, place: where the mask of the token in the guess's place stands
        """
        is_allowed = masks[place * self._num_words + guess // 32] >> guess % 32 & 1
        return bool(is_allowed) and guess not in seq.stop_ids and self._followed[seq].read_ahead(guess)

    def _fill(self, masks: array[int], lines: list[tuple[Sequence, int]], num_guesses: int) -> None:
        """Make the masks behind so many guesses of sequences; lines: each with the place of its mask"""
        if not lines:
            return
        assert self._executor is not None
        jobs: list[tuple[LLMatcher, int]] = []
        for seq, place in lines:
            newest = self._followed[seq].newest
            if isinstance(newest, AnswerMatcher) and newest.is_thinking:
                newest.fill(self._mask(masks, place))
            else:
                jobs.append((newest.form if isinstance(newest, AnswerMatcher) else newest, place))
        address, length = masks.buffer_info()
        where = address, self._num_words * masks.itemsize, length // self._num_words
        for share in [jobs] if len(jobs) > COPIES else [[job] for job in jobs]:  # a job alone stays on this thread
            self._executor.unsafe_compute_mask_ptr(share, *where)
        for seq, place in lines:
            if seq.num_output_tokens + num_guesses < seq.params.min_tokens:
                _suppress(self._mask(masks, place), seq.stop_ids)

    def _mask(self, masks: array[int], place: int) -> Mask:
        """Return one of the masks, to be written."""
        return np.frombuffer(masks, np.uint32)[place * self._num_words :][: self._num_words]

    def close(self) -> None:
        """End the threads."""
        self._executor = None


def _is_whole(matcher: LLMatcher, end: int) -> bool:
    """Whether a text is one of its grammar's with an end-of-sequence token behind it, which the grammar may name."""
    return bool(matcher.is_accepting() or (matcher.consume_token(end) and matcher.is_accepting()))


def _suppress(mask: Mask, token_ids: frozenset[int]) -> None:
    """Take tokens out of a mask, unless no token is left then: a text that can only end, ends."""
    kept = mask.copy()
    for token_id in token_ids:
        kept[token_id // 32] &= ~np.uint32(1 << token_id % 32)
    if kept.any():
        mask[:] = kept
