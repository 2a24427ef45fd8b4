"""Rules of a beam search: which beams end, which go on, and how good they are. Two libraries have two definitions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Set
from typing import NamedTuple

from nanoinfer.beam_search_params import BeamSearchParams


class Candidate(NamedTuple):
    """A beam with one more token.

    logprob: the sum of the log-probabilities of all its generated tokens
    beam: the number of the beam among those of its search
    """

    logprob: float
    beam: int
    token_id: int


class Rules(ABC):
    """What a search does with its candidates."""

    def __init__(self, params: BeamSearchParams) -> None:
        self.params = params

    @abstractmethod
    def num_likeliest(self, num_stops: int) -> int:
        """Return how many of the likeliest tokens behind a beam are candidates; num_stops: tokens that end a beam."""

    @abstractmethod
    def divide(
        self, candidates: list[Candidate], stop_ids: Set[int], is_last: bool
    ) -> tuple[list[Candidate], list[Candidate]]:
        """Return the candidates that are finished, and those that go on, the likeliest first.

        candidates: the likeliest first; stop_ids: tokens that end a beam; is_last: the beams can get no more tokens
        """

    @abstractmethod
    def score(self, logprob: float, num_prompt_tokens: int, num_tokens: int, is_stopped: bool) -> float:
        """Return how good a finished candidate is.

        num_tokens: generated ones, the last included; is_stopped: the last one has ended it
        """

    @abstractmethod
    def is_settled(self, best: float, num_tokens: int, most_tokens: int, scores: list[float]) -> bool:
        """Whether the search ends although beams could go on.

        best: the likeliest beam's logprob; num_tokens: that it has generated, of most_tokens that it may generate
        scores: of the best that are finished so far, at most beam_width, the best first
        """


class TransformersRules(Rules):
    """As transformers' generate with num_beams: generated tokens count, and early_stopping says when a search ends."""

    def num_likeliest(self, num_stops: int) -> int:
        """Return the candidates of one beam: so many are never too few, even if all the others' are less likely."""
        return self.params.beam_width + num_stops

    def divide(
        self, candidates: list[Candidate], stop_ids: Set[int], is_last: bool
    ) -> tuple[list[Candidate], list[Candidate]]:
        """Finish only those that are among the beam_width likeliest of all."""
        best = candidates[: self.params.beam_width]
        if is_last:
            return best, []
        others = [candidate for candidate in candidates if candidate.token_id not in stop_ids]
        return [candidate for candidate in best if candidate.token_id in stop_ids], others[: self.params.beam_width]

    def score(self, logprob: float, num_prompt_tokens: int, num_tokens: int, is_stopped: bool) -> float:
        """Divide by the number of generated tokens to the power of the length penalty."""
        return logprob / float(num_tokens) ** self.params.length_penalty

    def is_settled(self, best: float, num_tokens: int, most_tokens: int, scores: list[float]) -> bool:
        """Compare the worst that is finished with what the likeliest beam may come to, as early_stopping says."""
        if len(scores) < self.params.beam_width:
            return False
        if self.params.early_stopping is True or self.params.beam_width == 1:  # one beam is greedy generation
            return True
        grows = self.params.early_stopping == "never" and self.params.length_penalty > 0
        return self.score(best, 0, most_tokens if grows else num_tokens, False) <= scores[-1]


class VllmRules(Rules):
    """As vLLM's beam_search up to 0.32: the prompt's tokens count too, and every beam runs on to max_tokens.

    A token that ends a beam does not count. vLLM 0.33 counts generated tokens alone, that token included.
    """

    def __init__(self, params: BeamSearchParams) -> None:
        if params.early_stopping is not False:
            raise ValueError(
                f"params.early_stopping={params.early_stopping!r}: must be False by vLLM's names, for its searches run"
                " on to max_tokens; nanoinfer.LLM has early stopping"
            )
        super().__init__(params)

    def num_likeliest(self, num_stops: int) -> int:
        """Return twice the beams."""
        return 2 * self.params.beam_width

    def divide(
        self, candidates: list[Candidate], stop_ids: Set[int], is_last: bool
    ) -> tuple[list[Candidate], list[Candidate]]:
        """Finish all that a token ends."""
        stopped = [candidate for candidate in candidates if candidate.token_id in stop_ids]
        others = [candidate for candidate in candidates if candidate.token_id not in stop_ids]
        others = others[: self.params.beam_width]
        return (stopped + others, []) if is_last else (stopped, others)

    def score(self, logprob: float, num_prompt_tokens: int, num_tokens: int, is_stopped: bool) -> float:
        """Divide by the number of all tokens but a stop token to the power of the length penalty."""
        return logprob / float(num_prompt_tokens + num_tokens - is_stopped) ** self.params.length_penalty

    def is_settled(self, best: float, num_tokens: int, most_tokens: int, scores: list[float]) -> bool:
        """Never end early."""
        return False
