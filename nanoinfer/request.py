"""Requests: the prompts on their way through the engine, and the text of their samples."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PreTrainedTokenizerBase

from nanoinfer.checks import as_int, short
from nanoinfer.detokenizer import Detokenizer, decode
from nanoinfer.engine.llm_engine import LLMEngine, StepResult
from nanoinfer.engine.sequence import Sequence
from nanoinfer.outputs import RequestOutput, SampleOutput, StreamOutput, Timings
from nanoinfer.sampling_params import SamplingParams


class Sample:
    """One sequence and its text, which is made at its end, or token by token where it is needed sooner.

    Whatever goes wrong with the text ends this sequence alone.
    """

    def __init__(
        self, seq: Sequence, engine: LLMEngine, tokenizer: PreTrainedTokenizerBase | None, streams: bool
    ) -> None:
        """streams: take_new will be asked for what is new"""
        self.seq = seq
        self.streams = streams
        self._engine = engine
        self._tokenizer = tokenizer
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None and (streams or seq.params.stop):
            self._detokenizer = Detokenizer(tokenizer, seq)
        self._num_taken = 0  # tokens

    @property
    def is_watched(self) -> bool:
        """Whether `update` wants to be called after each of its steps."""
        return self.streams or self._detokenizer is not None

    def update(self) -> None:
        """Read the text of the newest token, which may end the sequence."""
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
        """What came since the last time; index: the prompt's, among those of the call."""
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
            logprobs=None if seq.params.logprobs is None else seq.logprobs[start:],
            prompt_logprobs=self.prompt_logprobs if start == 0 else None,
        )

    @property
    def prompt_logprobs(self) -> list[Mapping[int, float] | None] | None:
        """Those of the prompt, with its first sample, if they are asked for."""
        asked = self.seq.params.prompt_logprobs is not None and self.seq.sample_index == 0
        return [None, *self.seq.prompt_logprobs] if asked else None

    def output(self) -> SampleOutput:
        """The result of a sequence that has ended."""
        seq = self.seq
        text = self._text()
        return SampleOutput(
            text=text,
            token_ids=seq.output_token_ids,
            finish_reason=seq.finish_reason or "abort",
            stop_reason=seq.stop_reason,
            logprobs=None if seq.params.logprobs is None else seq.logprobs,
        )

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
        prompt: list[int],
        params: SamplingParams,
        engine: LLMEngine,
        tokenizer: PreTrainedTokenizerBase | None,
        streams: bool = False,
    ) -> None:
        """streams: what is new of it will be taken as it comes"""
        if not params.detokenize:
            tokenizer = None
        self.samples = [Sample(seq, engine, tokenizer, streams) for seq in engine.add_request(prompt, params)]
        self.num_running = len(self.samples)  # that have not ended, kept by Requests
        self.id = self.samples[0].seq.request_id

    def output(self) -> RequestOutput:
        """The result, once all samples have ended."""
        first = self.samples[0].seq
        samples = [sample.output() for sample in self.samples]
        return RequestOutput(
            **samples[0],
            request_id=self.id,
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
    """The requests whose outputs have not been given out.

    Requests change only inside a `with` of this object. An error or an interrupt inside it drops all of them, as it may
    have left some half changed. If even the dropping is interrupted, the next `with` completes it.

    finished: those whose samples have all ended, in the order of their ends
    """

    def __init__(self, engine: LLMEngine, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.finished: list[Request] = []
        self._engine = engine
        self._tokenizer = tokenizer
        self._running: dict[int, Request] = {}  # by id
        self._watched: dict[Sequence, Sample] = {}  # those of theirs that are looked at after each of their steps
        self._changed: list[Sample] = []  # of those that stream, since they were last asked for
        self._is_settled = True

    def __enter__(self) -> None:
        self.settle()
        self._is_settled = False

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self._is_settled = True
        else:
            self.abort_all()

    def settle(self) -> None:
        """Drop what an interrupt has left."""
        if not self._is_settled:
            self.abort_all()

    @property
    def num_running(self) -> int:
        """Requests that have not ended."""
        return len(self._running)

    def add(self, prompt: list[int], params: SamplingParams, streams: bool = False) -> Request:
        """Queue a request."""
        request = Request(prompt, params, self._engine, self._tokenizer, streams)
        self._running[request.id] = request
        self._watched.update((sample.seq, sample) for sample in request.samples if sample.is_watched)
        return request

    def step(self) -> StepResult:
        """One step of the engine, and what it means for the texts."""
        result = self._engine.step()
        ended = result.finished
        if self._watched:
            watched = [self._watched[seq] for seq in result.advanced if seq in self._watched]
            running = [sample for sample in watched if not sample.seq.is_finished]
            for sample in watched:
                sample.update()
            self._changed += [sample for sample in watched if sample.streams and not sample.seq.is_finished]
            ended = ended + [sample.seq for sample in running if sample.seq.is_finished]
        self._retire(ended)
        return result

    def find(self, request_id: int) -> Request | None:
        """The request, unless it has ended. Raises ValueError for an id that was never given."""
        known = as_int(request_id)
        if known is None or known not in range(self._engine.num_requests):
            raise ValueError(
                f"request_id={short(request_id)}: no request has it; add_request returns those that have one"
            )
        return self._running.get(known)

    def abort(self, request: Request) -> None:
        """End what has not ended of a request; also in the midst of a `with`."""
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
        """Forget everything."""
        self._is_settled = False
        self._engine.abort_all()
        self._running.clear()
        self._watched.clear()
        self._changed.clear()
        self.finished.clear()
        self._is_settled = True

    def take_finished(self) -> list[Request]:
        """Those that have ended since the last time."""
        finished, self.finished = self.finished, []
        return finished

    def take_changed(self) -> list[Sample]:
        """The streaming samples that have something new since the last time, or have ended; some perhaps twice."""
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
            self._engine.drain()  # a stop string ends a sequence whose next token is on its way
