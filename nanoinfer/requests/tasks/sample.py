"""Sample: a sequence that an engine computes, and its text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.engine.results.routed_experts import ExpertIds
from nanoinfer.engine.sequence import Sequence
from nanoinfer.logprob import CandidatesLog
from nanoinfer.requests.tasks.results import SampleResult
from nanoinfer.requests.text.detokenizer import Detokenizer, decode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Sample:
    """One sequence and its text. The text is made when the sequence ends, or token by token if it is needed sooner.

    An error while the text is made ends this sequence alone.

    number: its request's
    streams: its tokens are told as they come
    """

    __slots__ = ("_detokenizer", "_engine", "_num_told", "_tokenizer", "number", "seq", "streams")

    def __init__(
        self, number: int, seq: Sequence, engine: LLMEngine, tokenizer: PreTrainedTokenizerBase | None, streams: bool
    ) -> None:
        self.number = number
        self.seq = seq
        self.streams = streams
        self._engine = engine
        self._tokenizer = tokenizer if seq.params.detokenize else None
        self._detokenizer: Detokenizer | None = None
        if self._tokenizer is not None and (streams or seq.params.stop):
            self._detokenizer = Detokenizer(self._tokenizer, seq)
            if seq.params.stop and engine.config.speculation is not None:
                seq.on_token = self.update  # what comes behind a stop string in the same step is none of its tokens
        self._num_told = 0  # tokens of its results

    @property
    def is_watched(self) -> bool:
        """Whether `update` must be called after each step that computed a token of the sequence."""
        return self.streams or self._detokenizer is not None

    def update(self) -> None:
        """Add the newest token's text. A stop string in it ends the sequence."""
        if self._detokenizer is None:
            return
        try:
            stop = self._detokenizer.update()
        except Exception as error:
            self._fail(error)
        else:
            if stop is not None:
                self._engine.finish(self.seq, "stop", stop)

    def result(self) -> SampleResult:
        """Return what is new since the last call; of a sample that does not stream, all, once it has ended."""
        seq, params, start = self.seq, self.seq.params, self._num_told
        text = self._text()  # first, as it may fail
        self._num_told = seq.num_output_tokens
        is_finished = seq.is_finished
        return SampleResult(
            number=seq.sample_index,
            text=text,
            token_ids=seq.token_ids[seq.num_prompt_tokens + start :].tolist(),
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
            weights_versions=seq.weights_versions,
            num_proposed_tokens=seq.num_proposed_tokens,
            num_accepted_tokens=seq.num_accepted_tokens,
            num_cached_tokens=seq.num_cached_tokens,
            started_at=seq.started_at,
            first_token_at=seq.first_token_at,
            finished_at=seq.finished_at,
            logprobs=None if params.logprobs is None else seq.logprobs.since(start),
            prompt_logprobs=self._prompt_logprobs if start == 0 else None,
            kept_tokens=seq.kept_tokens[start:] if params.kept_tokens else None,
            entropies=seq.entropies[start:] if params.entropy else None,
            routed_experts=self._routed_experts if is_finished else None,
            hidden_states=seq.hidden_states if is_finished else None,
            pooled=seq.pooled if seq.finish_reason == "length" else None,
        )

    @property
    def _prompt_logprobs(self) -> CandidatesLog | None:
        seq = self.seq
        return None if seq.params.prompt_logprobs is None or seq.sample_index > 0 else seq.prompt_logprobs

    @property
    def _routed_experts(self) -> ExpertIds | None:
        return None if self.seq.routed_experts is None else self.seq.routed_experts.array()

    def _text(self) -> str:
        if self._detokenizer is not None:
            return self._detokenizer.take_text() if self.streams else self._detokenizer.text
        if self._tokenizer is None:
            return ""
        try:
            return decode(self._tokenizer, self.seq)
        except Exception as error:
            self._fail(error)
            return ""

    def _fail(self, error: Exception) -> None:
        self._engine.finish(self.seq, "error", f"{type(error).__name__}: {error}")
