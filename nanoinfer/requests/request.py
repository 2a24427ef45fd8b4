"""Requests: the prompts on their way through the engine, and the text of their samples."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

from transformers import PreTrainedTokenizerBase

from nanoinfer.checks import as_int, check_choice, short
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.engine.routed_experts import ExpertIds
from nanoinfer.engine.sequence import Sequence
from nanoinfer.engine.step_result import StepResult
from nanoinfer.logprob import Decode
from nanoinfer.requests.detokenizer import Detokenizer, decode, decoder
from nanoinfer.requests.inputs import Prepared
from nanoinfer.requests.outputs import Later, RequestOutput, SampleOutput, StreamOutput, Timings

Fate = Literal["recompute", "keep", "abort"]  # of the requests that run when the weights change


class Sample:
    """One sequence and its text. The text is made when the sequence ends, or token by token if it is needed sooner.

    An error while the text is made ends this sequence alone.
    """

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
            logprobs=None if seq.params.logprobs is None else seq.logprobs.logprobs(self._decode, start),
            kept_tokens=seq.kept_tokens[start:] if seq.params.kept_tokens else None,
            routed_experts=self._routed_experts if seq.is_finished else None,
            prompt_logprobs=self.prompt_logprobs if start == 0 else None,
        )

    @property
    def prompt_logprobs(self) -> Later | None:
        """The prompt's log-probabilities, if they are asked for and this is the first sample; otherwise None."""
        params = self.seq.params
        if params.prompt_logprobs is None or self.seq.sample_index > 0:
            return None
        log, decode = self.seq.prompt_logprobs, self._decode
        return Later(lambda: [None] * max(1, params.prompt_logprobs_start) + log.logprobs(decode))

    def output(self) -> SampleOutput:
        """Return the result of the sequence, which has ended."""
        seq = self.seq
        text = self._text()
        return SampleOutput(
            index=seq.sample_index,
            text=text,
            token_ids=seq.output_token_ids,
            finish_reason=seq.finish_reason or "abort",
            stop_reason=seq.stop_reason,
            weights_versions=seq.weights_versions,
            logprobs=None if seq.params.logprobs is None else Later(partial(seq.logprobs.logprobs, self._decode)),
            kept_tokens=seq.kept_tokens if seq.params.kept_tokens else None,
            routed_experts=self._routed_experts,
        )

    @property
    def _routed_experts(self) -> ExpertIds | None:
        return None if self.seq.routed_experts is None else self.seq.routed_experts.array()

    @property
    def _decode(self) -> Decode | None:
        return None if self._tokenizer is None else decoder(self._tokenizer, skip_special_tokens=False)

    def _text(self) -> str:
        if self._detokenizer is not None:
            return self._detokenizer.text
        if self._tokenizer is None:
            return ""
        try:
            return decode(self._tokenizer, self.seq)
        except Exception as error:
            self._fail(error)
            return ""

    def _fail(self, error: Exception) -> None:
        self._engine.finish(self.seq, "error", f"{type(error).__name__}: {error}")


class Request:
    """A prompt and its samples."""

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
        seqs = engine.add_request(prompt.token_ids, prompt.params, prompt.grammar)
        self.prompt = prompt
        self.samples = [Sample(seq, engine, tokenizer, streams) for seq in seqs]
        self.num_running = len(self.samples)  # samples that have not ended, kept by Requests
        self.id = self.samples[0].seq.request_id

    def output(self) -> RequestOutput:
        """Return the result, once all samples have ended."""
        first = self.samples[0].seq
        samples = [sample.output() for sample in self.samples]
        return RequestOutput(
            dict.items(samples[0]),
            request_id=self.id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            prompt_logprobs=self.samples[0].prompt_logprobs,
            num_cached_tokens=first.num_cached_tokens,
            timings=Timings(
                queued=first.queued_at,
                first_token=first.first_token_at or None,
                finished=max(sample.seq.finished_at for sample in self.samples),
            ),
            samples=samples,
        )


class Requests:
    """The requests whose outputs have not been returned yet.

    Change requests only inside `with requests:`. If the block is left by an exception (Ctrl-C too), every request is
    dropped, because one may be half-updated. If Ctrl-C interrupts even that, the next `with` completes it.

    finished: the requests whose samples have all ended, in the order in which they ended
    """

    def __init__(self, engine: LLMEngine, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.finished: list[Request] = []
        self._engine = engine
        self._tokenizer = tokenizer
        self._running: dict[int, Request] = {}  # by id
        self._watched: dict[Sequence, Sample] = {}  # the samples to update after each of their steps
        self._changed: list[Sample] = []  # streaming samples, since the last take_changed
        self._is_settled = True  # no request is half-updated

    def __enter__(self) -> None:
        self.settle()
        self._is_settled = False

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self._is_settled = True
        else:
            self.abort_all()

    def settle(self) -> None:
        """Drop every request if an interrupt has left one half-updated."""
        if not self._is_settled:
            self.abort_all()

    @property
    def num_running(self) -> int:
        """The number of requests that have not ended."""
        return len(self._running)

    def add(self, prompt: Prepared, streams: bool = False) -> Request:
        """Queue a request."""
        request = Request(prompt, self._engine, self._tokenizer, streams)
        self._running[request.id] = request
        self._watched.update((sample.seq, sample) for sample in request.samples if sample.is_watched)
        return request

    def step(self) -> StepResult:
        """Run one step of the engine, and update the texts of the samples that it advanced."""
        result = self._engine.step()
        self._update(result)
        return result

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

    def before_new_weights(self, in_flight: Fate) -> Callable[[], None]:
        """Return the function that prepares the requests for new weights; in_flight: as for LLM.update_weights."""
        check_choice("in_flight", in_flight, list(get_args(Fate)))

        def prepare() -> None:
            with self:
                for result in self._engine.drain():
                    self._update(result)
                if in_flight == "recompute":
                    self._engine.scheduler.restart()
                elif in_flight == "abort":
                    for request in list(self._running.values()):
                        self.abort(request)

        return prepare

    def find(self, request_id: int) -> Request | None:
        """Return the request, or None if it has ended. Raises ValueError for an id that no request has had."""
        known = as_int(request_id)
        if known is None or known not in range(self._engine.num_requests):
            raise ValueError(
                f"request_id={short(request_id)}: no request has it; pass a number that add_request returned"
            )
        return self._running.get(known)

    def abort(self, request: Request) -> None:
        """End the samples of a request that have not ended, outside or in the middle of `with requests:`."""
        was_settled, self._is_settled = self._is_settled, False
        try:
            seqs = [sample.seq for sample in request.samples if not sample.seq.is_finished]
            for seq in seqs:
                self._engine.finish(seq, "abort")
                if seq in self._watched:
                    self._watched[seq].update()
            self._retire(seqs)
        except BaseException:
            self.abort_all()
            raise
        self._is_settled = was_settled

    def abort_all(self) -> None:
        """Drop every request, ended ones included."""
        self._is_settled = False
        self._engine.abort_all()
        self._running.clear()
        self._watched.clear()
        self._changed.clear()
        self.finished.clear()
        self._is_settled = True

    def take_finished(self) -> list[Request]:
        """Return the requests that have ended since the last call."""
        finished, self.finished = self.finished, []
        return finished

    def take_changed(self) -> list[Sample]:
        """Return the streaming samples that have new tokens or ended since the last call; one may be there twice."""
        changed, self._changed = self._changed, []
        return changed

    def _retire(self, ended: list[Sequence]) -> None:
        for seq in ended:
            sample = self._watched.pop(seq, None)
            if sample is not None and sample.streams:
                self._changed.append(sample)
            request = self._running[seq.request_id]
            request.num_running -= 1
            if request.num_running == 0:
                self.finished.append(self._running.pop(request.id))
        if not self._running:
            self._engine.drain()  # a stop string ends a sequence whose next token is still in flight
