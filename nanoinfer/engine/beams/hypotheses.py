"""Hypotheses: the texts that one prompt's beam search follows, and those that it has finished. Plain Python."""

from __future__ import annotations

from array import array
from collections.abc import Set
from dataclasses import dataclass
from math import isnan
from typing import NamedTuple

from nanoinfer.engine.beams.rules import Candidate, Rules
from nanoinfer.logprob import MINUS_INFINITY, Candidates, Decode, LogProb


class Likeliest(NamedTuple):
    """The likeliest tokens of one place, the likeliest first, and their log-probabilities."""

    token_ids: array[int]
    values: array[float]

    @property
    def is_finite(self) -> bool:
        """Whether the model's logits are; otherwise each log-probability is NaN."""
        return not isnan(self.values[0])

    def logprobs(self, decode: Decode | None) -> dict[int, LogProb]:
        """Return token id -> log-probability; decode: makes text from tokens, None: there is no tokenizer."""
        token_ids, values = self.token_ids.tolist(), self.values.tolist()
        return Candidates([token_ids[0], *token_ids], [values[0], *values], rank=1).logprobs(decode)


@dataclass(frozen=True, slots=True, eq=False)
class Hypothesis:
    """What a beam has generated: its parent's tokens and one more. Beams that have begun alike share parents.

    logprob: the sum of the tokens' log-probabilities
    num_tokens: how many tokens it has generated
    token_id: the last of them; likeliest: the tokens among which that one was chosen
    """

    logprob: float = 0.0
    num_tokens: int = 0
    parent: Hypothesis | None = None
    token_id: int = -1
    likeliest: Likeliest | None = None

    def _path(self) -> list[Hypothesis]:
        """Return the hypotheses that have become this one, from the first token on."""
        path, node = [], self
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path[::-1]

    @property
    def token_ids(self) -> list[int]:
        """The generated tokens."""
        return [node.token_id for node in self._path()]

    def logprobs(self, decode: Decode | None) -> list[dict[int, LogProb]]:
        """Return for each generated token the log-probabilities of the likeliest tokens in its place."""
        return [node.likeliest.logprobs(decode) for node in self._path() if node.likeliest is not None]


class Finished(NamedTuple):
    """A hypothesis that has ended; is_stopped: its last token has ended it."""

    score: float
    hypothesis: Hypothesis
    is_stopped: bool


class Hypotheses:
    """The hypotheses of one prompt.

    beams: those that go on, the likeliest first
    finished: the best that have ended, at most beam_width, the best first
    has_failed: the model's logits were not finite; `finished` then has the beams as they were
    """

    def __init__(self, rules: Rules, num_prompt_tokens: int, most_tokens: int, stop_ids: Set[int]) -> None:
        """most_tokens: a beam ends after so many generated tokens; stop_ids: tokens that end it before."""
        self._rules = rules
        self._num_prompt_tokens, self._most_tokens, self._stop_ids = num_prompt_tokens, most_tokens, stop_ids
        self.beams = [Hypothesis()]
        self.finished: list[Finished] = []
        self.has_failed = False

    def advance(self, likeliest: list[Likeliest]) -> list[Candidate]:
        """Give the beams one more token; returns those that go on, none at the end of the search.

        likeliest: the likeliest tokens behind each beam
        """
        num_tokens = self.beams[0].num_tokens + 1
        is_last = num_tokens == self._most_tokens
        ended, going_on = self._rules.divide(self._candidates(likeliest), self._stop_ids, is_last)
        for candidate in ended:
            is_stopped = candidate.token_id in self._stop_ids
            score = self._rules.score(candidate.logprob, self._num_prompt_tokens, num_tokens, is_stopped)
            self.finished.append(Finished(score, self._child(candidate, likeliest), is_stopped))
        self.finished.sort(key=lambda own: own.score, reverse=True)
        del self.finished[self._rules.params.beam_width :]
        scores = [own.score for own in self.finished]
        if going_on and self._rules.is_settled(going_on[0].logprob, num_tokens, self._most_tokens, scores):
            going_on = []
        self.beams = [self._child(candidate, likeliest) for candidate in going_on]
        return going_on

    def fail(self) -> None:
        """End the search with what its beams have, because none of them can go on."""
        self.has_failed = True
        self.finished = [Finished(hypothesis.logprob, hypothesis, False) for hypothesis in self.beams]
        self.beams = []

    def _candidates(self, likeliest: list[Likeliest]) -> list[Candidate]:
        """Return every beam with every token of its likeliest, the likeliest first."""
        candidates = [
            Candidate(hypothesis.logprob + value, beam, token_id)
            for beam, (hypothesis, own) in enumerate(zip(self.beams, likeliest, strict=True))
            for token_id, value in zip(own.token_ids, own.values, strict=True)
            if value != MINUS_INFINITY
        ]
        return sorted(candidates, key=lambda candidate: candidate.logprob, reverse=True)

    def _child(self, candidate: Candidate, likeliest: list[Likeliest]) -> Hypothesis:
        parent = self.beams[candidate.beam]
        return Hypothesis(
            candidate.logprob, parent.num_tokens + 1, parent, candidate.token_id, likeliest[candidate.beam]
        )
