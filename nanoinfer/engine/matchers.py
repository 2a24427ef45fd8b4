"""Matchers: how far the texts of guided sequences have come in their grammars, and which tokens may follow."""

from __future__ import annotations

from array import array
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from nanoinfer.engine.sequence import FinishReason, Sequence
from nanoinfer.grammar import NUM_THREADS, Grammar, error_of
from nanoinfer.runner.message import MaskMessage

if TYPE_CHECKING:
    from llguidance import LLMatcher

Mask = npt.NDArray[np.uint32]  # one sequence's; bit i % 32 of word i // 32 is token i's
ALL = -1  # 32 tokens that may all be drawn


class Matchers:
    """The matcher of each guided sequence that has not ended. A preempted sequence keeps its own."""

    def __init__(self) -> None:
        self._matchers: dict[Sequence, tuple[LLMatcher, int]] = {}  # each with the number of its thread
        self._num_words = 0  # of a mask
        self._threads = ThreadPoolExecutor(NUM_THREADS, "masks")  # starts a thread when there is work for it

    def add(self, seq: Sequence, grammar: Grammar) -> None:
        """Let a sequence that has generated nothing follow a grammar."""
        self._num_words = grammar.num_words
        self._matchers[seq] = grammar.matcher()

    def drop(self, seq: Sequence) -> None:
        """Forget a sequence, guided or not, that has ended."""
        self._matchers.pop(seq, None)

    def clear(self) -> None:
        """Forget every sequence."""
        self._matchers.clear()

    def guided(self, seqs: list[Sequence]) -> list[Sequence]:
        """Return the guided ones among the sequences, in their order."""
        return [seq for seq in seqs if seq in self._matchers] if self._matchers else []

    def advance(self, seq: Sequence) -> tuple[FinishReason, str | None] | None:
        """Read a sequence's newest token; returns why that ends the sequence, with what is wrong; None: it goes on.

        A sequence that ended before has no matcher: the token that the step has computed for it does not count.
        """
        if seq not in self._matchers:
            return None
        matcher, _ = self._matchers[seq]
        if seq.is_finished:
            self.drop(seq)
        ended_by_token = seq.finish_reason == "stop"
        if not ended_by_token:
            matcher.consume_token(seq.token_ids[-1])
        if matcher.is_error():  # perhaps since its last mask, which then allowed an end
            return "error", f"structured_outputs: {error_of(matcher)}"
        return ("stop", None) if matcher.is_stopped() and not ended_by_token else None

    def masks(self, seqs: list[Sequence]) -> MaskMessage:
        """Make the masks of the sequences' next tokens; all tokens are allowed where a sequence has ended meanwhile."""
        words = array("i", [ALL]) * (len(seqs) * self._num_words)
        masks = np.frombuffer(words, dtype=np.uint32).reshape(len(seqs), -1)
        shares: dict[int, list[tuple[Mask, Sequence]]] = {}
        for mask, seq in zip(masks, seqs, strict=True):
            if seq in self._matchers:
                shares.setdefault(self._matchers[seq][1], []).append((mask, seq))
        first, *others = shares.values() or [[]]
        pending = [self._threads.submit(self._fill, share) for share in others]
        self._fill(first)
        for future in pending:
            future.result()
        return MaskMessage(len(seqs), words)

    def _fill(self, share: list[tuple[Mask, Sequence]]) -> None:
        for mask, seq in share:
            matcher, _ = self._matchers[seq]
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if seq.num_output_tokens < seq.params.min_tokens:
                _suppress(mask, seq.stop_ids)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()


def _suppress(mask: Mask, token_ids: frozenset[int]) -> None:
    """Take tokens out of a mask, unless no token is left then: a text that can only end, ends."""
    kept = mask.copy()
    for token_id in token_ids:
        kept[token_id // 32] &= ~np.uint32(1 << token_id % 32)
    if kept.any():
        mask[:] = kept
