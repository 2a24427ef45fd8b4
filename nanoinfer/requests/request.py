"""Requests: the prompts on their way through the engine, and the text of their samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, get_args

from nanoinfer.checks import check_choice
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.engine.results.routed_experts import ExpertIds
from nanoinfer.engine.results.step_result import StepResult
from nanoinfer.engine.sequence import Sequence
from nanoinfer.logprob import CandidatesLog, Decode
from nanoinfer.requests.interface import AnyRequests, Fate
from nanoinfer.requests.outputs import RequestOutput, StreamOutput
from nanoinfer.requests.prompts import Prepared
from nanoinfer.requests.results import SampleResult, prompt_logprobs, request_output
from nanoinfer.requests.text.detokenizer import Detokenizer, decode
from nanoinfer.requests.text.spelling import decoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Sample:
    """One sequence and its text. The text is made when the sequence ends, or token by token if it is needed sooner.

    An error while the text is made ends this sequence alone.
    """

    __slots__ = ("_detokenizer", "_engine", "_num_taken", "_tokenizer", "seq", "streams")

    def __init__(
        self, seq: Sequence, engine: LLMEngine, tokenizer: PreTrainedTokenizerBase | None, streams: bool
    ) -> None:
        """streams: the caller takes new text and tokens as they come, by take_new."""
        self.seq = seq
        self.streams = streams
        self._engine = engine
        self._tokenizer = tokenizer
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None and (streams or seq.params.stop):
            self._detokenizer = Detokenizer(tokenizer, seq)
            if seq.params.stop and engine.config.speculation is not None:
                seq.on_token = self.update  # what comes behind a stop string in the same step is none of its tokens
        self._num_taken = 0  # tokens that take_new has returned

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

    def take_new(self, index: int) -> StreamOutput:
        """Return the text and tokens since the last call; index: the prompt's place in the list given to LLM.stream."""
        seq, start = self.seq, self._num_taken
        self._num_taken = seq.num_output_tokens
        return StreamOutput(
            request_id=seq.request_id,
            index=index,
            sample=seq.sample_index,
            text="" if self._detokenizer is None else self._detokenizer.take(),
            token_ids=seq.token_ids[seq.num_prompt_tokens + start :].tolist(),
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
            weights_versions=seq.weights_versions,
            logprobs=None if seq.params.logprobs is None else seq.logprobs.logprobs(self.decode, start),
            kept_tokens=seq.kept_tokens[start:] if seq.params.kept_tokens else None,
            routed_experts=self._routed_experts if seq.is_finished else None,
            prompt_logprobs=prompt_logprobs(seq.params, self._prompt_logprobs, self.decode) if start == 0 else None,
        )

    def result(self) -> SampleResult:
        """Return the result of the sequence, which has ended."""
        seq, params = self.seq, self.seq.params
        text = self._text()
        return SampleResult(
            number=seq.sample_index,
            text=text,
            token_ids=seq.output_token_ids,
            finish_reason=seq.finish_reason or "abort",
            stop_reason=seq.stop_reason,
            weights_versions=seq.weights_versions,
            num_proposed_tokens=seq.num_proposed_tokens,
            num_accepted_tokens=seq.num_accepted_tokens,
            num_cached_tokens=seq.num_cached_tokens,
            started_at=seq.started_at,
            first_token_at=seq.first_token_at,
            finished_at=seq.finished_at,
            logprobs=None if params.logprobs is None else seq.logprobs,
            prompt_logprobs=self._prompt_logprobs,
            kept_tokens=seq.kept_tokens if params.kept_tokens else None,
            routed_experts=self._routed_experts,
            pooled=seq.pooled if seq.finish_reason == "length" else None,
        )

    @property
    def _prompt_logprobs(self) -> CandidatesLog | None:
        seq = self.seq
        return None if seq.params.prompt_logprobs is None or seq.sample_index > 0 else seq.prompt_logprobs

    @property
    def _routed_experts(self) -> ExpertIds | None:
        return None if self.seq.routed_experts is None else self.seq.routed_experts.array()

    @property
    def decode(self) -> Decode | None:
        """What makes text from the tokens of log-probabilities; None without a tokenizer."""
        return None if self._tokenizer is None else decoder(self._tokenizer, skip_special_tokens=False)

    def _text(self) -> str:
        if self._detokenizer is not None:
            return self._detokenizer.text
        if self._tokenizer is None:
            return ""
        try:
            return decode(self._tokenizer, self.seq)
        except Exception as error:
            self._engine.counters.change_end(self.seq.finish_reason or "abort", "error")
            self._fail(error)
            return ""

    def _fail(self, error: Exception) -> None:
        self._engine.finish(self.seq, "error", f"{type(error).__name__}: {error}")


class Request:
    """A prompt and its samples."""

    __slots__ = ("id", "num_running", "prompt", "samples")

    def __init__(
        self,
        prompt: Prepared,
        engine: LLMEngine,
        tokenizer: PreTrainedTokenizerBase | None,
        streams: bool = False,
    ) -> None:
        """streams: the caller takes each sample's new text and tokens as they come."""
        if not prompt.params.detokenize:
            tokenizer = None
        seqs = engine.add_request(prompt.prompt, prompt.params, prompt.grammar, prompt.seed, prompt.samples)
        self.prompt = prompt
        self.samples = [Sample(seq, engine, tokenizer, streams) for seq in seqs]
        self.num_running = len(self.samples)  # kept by Requests
        self.id = self.samples[0].seq.request_id

    def output(self) -> RequestOutput:
        """Return the result, once all samples have ended."""
        first = self.samples[0]
        return request_output(self.id, self.prompt, self.results(), first.decode, first.seq.queued_at)

    def first_result(self) -> SampleResult:
        """Return the result of the first sample, once it has ended."""
        return self.samples[0].result()

    def results(self) -> list[SampleResult]:
        """Return the results of all samples, once they have ended."""
        return [sample.result() for sample in self.samples]


class Requests(AnyRequests[Request, Sample]):
    """The requests of one engine."""

    def __init__(self, engine: LLMEngine, tokenizer: PreTrainedTokenizerBase | None) -> None:
        super().__init__(engine.counters)
        self._engine = engine
        self._tokenizer = tokenizer
        self._watched: dict[Sequence, Sample] = {}  # the samples to update after each of their steps

    @property
    def num_added(self) -> int:
        """The number of requests that have been added so far, ended ones included."""
        return self._engine.num_requests

    def add(self, prompt: Prepared, streams: bool = False) -> Request:
        """Queue a request."""
        request = Request(prompt, self._engine, self._tokenizer, streams)
        self._running[request.id] = request
        self._watched.update((sample.seq, sample) for sample in request.samples if sample.is_watched)
        return request

    def add_all(self, prompts: list[Prepared]) -> list[Request]:
        """Queue the requests of one call; those that may get more tokens begin sooner."""
        requests = [self.add(prompt) for prompt in prompts]
        self._engine.scheduler.put_longest_first()
        return requests

    def step(self) -> list[StepResult]:
        """Run one step of the engine, and update the texts of the samples that it advanced; returns the step."""
        result = self._engine.step()
        self._update(result)
        return [result]

    def _update(self, result: StepResult) -> None:
        """Update the texts of the samples that a step advanced, and retire those that ended."""
        ended = result.finished
        if self._watched:
            watched = [self._watched[seq] for seq in result.advanced if seq in self._watched]
            running = [sample for sample in watched if not sample.seq.is_finished]
            for sample in watched:
                sample.update()
            self._changed += [sample for sample in watched if sample.streams and not sample.seq.is_finished]
            ended = ended + [sample.seq for sample in running if sample.seq.is_finished]
        self._retire(ended)

    def before_new_weights(self, in_flight: Fate, adapter: str | None = None) -> Callable[[], None]:
        """Return the function that prepares the requests for new weights, of the model or of an adapter."""
        check_choice("in_flight", in_flight, list(get_args(Fate)))

        def prepare() -> None:
            with self:
                if not self._affected(adapter):
                    return  # the others need not wait for a step in flight
                for result in self._engine.drain():
                    self._update(result)
                affected = self._affected(adapter)
                if in_flight == "recompute":
                    self._engine.scheduler.restart({sample.seq for request in affected for sample in request.samples})
                elif in_flight == "abort":
                    for request in affected:
                        self.abort(request)

        return prepare

    def _abort(self, request: Request) -> None:
        seqs = [sample.seq for sample in request.samples if not sample.seq.is_finished]
        for seq in seqs:
            self._engine.finish(seq, "abort")
            if seq in self._watched:
                self._watched[seq].update()
        self._retire(seqs)

    def _drop(self) -> None:
        self._engine.abort_all()
        self._watched.clear()

    def _retire(self, ended: list[Sequence]) -> None:
        for seq in ended:
            sample = self._watched.pop(seq, None)
            if sample is not None and sample.streams:
                self._changed.append(sample)
            self._end_sample(self._running[seq.request_id], seq.finish_reason or "abort")
        if not self._running:
            self._engine.drain()  # a stop string ends a sequence whose next token is still in flight
