"""Matchers: how far the texts of guided sequences have come in their grammars, and which tokens may follow."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nanoinfer.engine.sequence import FinishReason, Sequence
from nanoinfer.grammar import NUM_THREADS, Grammar, error_of
from nanoinfer.runner.message import MaskMessage

if TYPE_CHECKING:
    from llguidance import LLMatcher

Mask = npt.NDArray[np.uint32]  # one token's; bit i % 32 of word i // 32 is token i's
ALL = -1  # 32 tokens that may all be drawn


@dataclass(slots=True)
class Followed:
    """How far a sequence has come in its grammar.

    matcher: has read the last known token
    thread: the number of the thread that makes its masks
    most: the step in flight gives the text at most so many tokens: one, and its guesses as far as these may hold and
        the text goes on behind them
    ahead: a copy of the matcher that has read those guesses, too; None: there are none, or the text ends with the next.
        An error that it found holds only if the text comes as far
    """

    matcher: LLMatcher
    thread: int
    most: int = 1
    ahead: LLMatcher | None = None


class Matchers:
    """The matchers of each guided sequence that has not ended. A preempted sequence keeps its own."""

    def __init__(self) -> None:
        self._followed: dict[Sequence, Followed] = {}
        self._num_words = 0  # of a mask
        self._threads = ThreadPoolExecutor(NUM_THREADS, "masks")  # starts a thread when there is work for it

    def add(self, seq: Sequence, grammar: Grammar) -> None:
        """Let a sequence that has generated nothing follow a grammar."""
        self._num_words = grammar.num_words
        self._followed[seq] = Followed(*grammar.matcher())

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
        return num_behind

    def end_of(self, seq: Sequence) -> tuple[FinishReason, str | None] | None:
        """Return why a sequence ends with the tokens that were read, with what is wrong; None: it goes on."""
        if seq not in self._followed:
            return None
        matcher = self._followed[seq].matcher
        if seq.is_finished:
            self.drop(seq)
        if matcher.is_error():  # perhaps since its last mask, which then allowed an end
            return "error", f"structured_outputs: {error_of(matcher)}"
        return ("stop", None) if matcher.is_stopped() and seq.finish_reason != "stop" else None

    def masks(self, seqs: list[Sequence], read_guesses: Callable[[], list[list[int]]]) -> MaskMessage:
        """Make the masks of the sequences' next tokens, and of those behind their guesses.

        read_guesses: waits for the guesses, and returns those of each sequence; the first masks are made before

        All tokens are allowed where a sequence has ended meanwhile, and behind a guess that cannot hold.
        """
        words, masks = self._blank(len(seqs))
        self._share(self._begin, zip(seqs, masks, strict=True))
        guesses = read_guesses()
        words_behind, masks_behind = self._blank(sum(map(len, guesses)))
        ends = np.cumsum([len(own) for own in guesses])[:-1]
        behind = np.split(masks_behind, ends)
        jobs = zip(seqs, masks, guesses, behind, strict=True)
        self._share(self._follow, (job for job in jobs if job[2]))
        return MaskMessage([len(own) for own in guesses], words, words_behind)

    def _blank(self, count: int) -> tuple[array[int], npt.NDArray[np.uint32]]:
        """Return so many masks that allow all, as words and as rows of these."""
        words = array("i", [ALL]) * (count * self._num_words)
        return words, np.frombuffer(words, dtype=np.uint32).reshape(count, self._num_words)

    def _share(self, make: Callable[..., None], jobs: Iterable[tuple[Any, ...]]) -> None:
        """Let the threads make the masks of sequences; each job has the arguments of one, itself first."""
        shares: dict[int, list[tuple[Any, ...]]] = {}
        for job in jobs:
            if job[0] in self._followed:
                shares.setdefault(self._followed[job[0]].thread, []).append(job)

        def run(share: list[tuple[Any, ...]]) -> None:
            for job in share:
                make(*job)

        first, *others = shares.values() or [[]]
        pending = [self._threads.submit(run, share) for share in others]
        run(first)
        for future in pending:
            future.result()

    def _begin(self, seq: Sequence, mask: Mask) -> None:
        """Make the mask of a sequence's next token."""
        followed = self._followed[seq]
        followed.most, followed.ahead = 1, None
        _fill(mask, followed.matcher, seq, 0)

    def _follow(self, seq: Sequence, mask: Mask, guesses: list[int], behind: Iterable[Mask]) -> None:
        """Make the masks behind a sequence's guesses, as far as these may hold; mask: of its next token"""
        followed, ahead = self._followed[seq], None
        for guess, following in zip(guesses, behind, strict=True):
            if guess in seq.stop_ids or not mask[guess // 32] >> guess % 32 & 1:
                break
            ahead = ahead or followed.matcher.deep_copy()
            ahead.consume_token(guess)
            if ahead.is_stopped():
                return
            _fill(following, ahead, seq, followed.most)
            followed.most += 1
            mask = following
        followed.ahead = ahead

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()


def _fill(mask: Mask, matcher: LLMatcher, seq: Sequence, num_guesses: int) -> None:
    """Make the mask of the token behind so many guesses of a sequence; matcher: has read these"""
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    if seq.num_output_tokens + num_guesses < seq.params.min_tokens:
        _suppress(mask, seq.stop_ids)


def _suppress(mask: Mask, token_ids: frozenset[int]) -> None:
    """Take tokens out of a mask, unless no token is left then: a text that can only end, ends."""
    kept = mask.copy()
    for token_id in token_ids:
        kept[token_id // 32] &= ~np.uint32(1 << token_id % 32)
    if kept.any():
        mask[:] = kept
