"""ReplicaRequests: the requests of several replicas, of which the LLM's process holds the queue and the results."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, get_args

from nanoinfer.checks import check_choice
from nanoinfer.config import Config
from nanoinfer.engine.llm_engine import seed_of
from nanoinfer.engine.results.step_result import StepResult
from nanoinfer.engine.sequence import FinishReason
from nanoinfer.logprob import CandidatesLog, Decode
from nanoinfer.replicas.messages import Report, Task
from nanoinfer.replicas.replicas import Change, Replicas, results_of
from nanoinfer.replicas.sharing import Sharing, Unit
from nanoinfer.requests.interface import AnyRequests, Fate
from nanoinfer.requests.outputs import RequestOutput, StreamOutput
from nanoinfer.requests.prompts import Prepared
from nanoinfer.requests.results import SampleResult, request_output
from nanoinfer.requests.text.spelling import decoder
from nanoinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNBEGUN = 1 / 4  # of its rows, a replica has so many samples that it has not begun: no step waits for the queue
GIVEN_UP = "two replicas died while they computed this sample"


class StreamedSample:
    """A sample that streams: what its replica has told of it, and the caller has not taken.

    If its replica dies, another one tells all again from the beginning, and the caller gets the rest alone.
    """

    def __init__(self, request_id: int, number: int, params: SamplingParams, version: int) -> None:
        """number: the sample's among its request's; version: that of the weights"""
        self._facts: dict[str, Any] = dict.fromkeys(StreamOutput.__annotations__)
        self._facts.update(request_id=request_id, sample=number, weights_versions=[(0, version)])
        self._new: dict[str, Any] = {
            "text": "",
            "token_ids": [],
            "logprobs": None if params.logprobs is None else [],
            "kept_tokens": [] if params.kept_tokens else None,
        }  # each goes on where the last ended
        self._num_taken = dict.fromkeys(self._new, 0)
        self._num_told = dict.fromkeys(self._new, 0)  # by the replica that computes it now

    def tell(self, piece: dict[str, Any]) -> None:
        """Take what is new; piece: the fields of a StreamOutput."""
        for name, new in self._new.items():
            if new is not None:
                value, known = piece[name], self._num_taken[name] + len(new) - self._num_told[name]
                self._num_told[name] += len(value)
                self._new[name] = new + value[max(0, known) :]
        if self._num_taken["token_ids"]:
            piece["prompt_logprobs"] = None
        elif piece["prompt_logprobs"] is None:
            piece["prompt_logprobs"] = self._facts["prompt_logprobs"]
        self._facts = {**piece, "request_id": self._facts["request_id"]}

    def begin_again(self) -> None:
        """Forget what nobody has taken: the replica is dead, and another one tells it again."""
        self._num_told = dict.fromkeys(self._new, 0)
        self._empty()

    def _empty(self) -> None:
        self._new = {name: new if new is None else new[:0] for name, new in self._new.items()}

    def end(self, reason: FinishReason, stop_reason: str | None) -> None:
        """End the sample with what has been told of it."""
        self._facts.update(finish_reason=reason, stop_reason=stop_reason)

    def take_new(self, index: int) -> StreamOutput:
        """Return the text and tokens since the last call; index: the prompt's place in the list given to LLM.stream."""
        output = StreamOutput({**self._facts, **self._new, "index": index})
        for name, new in self._new.items():
            self._num_taken[name] += 0 if new is None else len(new)
        self._empty()
        self._facts["prompt_logprobs"] = None
        return output


class ReplicaRequest:
    """A prompt and the results of its samples.

    samples: those of a request that streams
    key: requests with equal keys begin alike
    """

    __slots__ = (
        "_decode",
        "_queued_at",
        "_version",
        "id",
        "is_aborted",
        "key",
        "num_running",
        "prompt",
        "results",
        "samples",
        "seed",
        "streams",
    )

    def __init__(
        self, id: int, prompt: Prepared, seed: int, key: Hashable, streams: bool, decode: Decode | None, version: int
    ) -> None:
        """decode: makes text of tokens; version: that of the weights, when the request comes"""
        params, count = prompt.params, prompt.params.n
        self.id, self.prompt, self.seed, self.key, self.streams = id, prompt, seed, key, streams
        self.samples = [StreamedSample(id, number, params, version) for number in range(count)] if streams else []
        self.is_aborted = False
        self.num_running = count
        self.results: list[SampleResult | None] = [None] * count
        self._decode = decode
        self._version = version
        self._queued_at = time.perf_counter()

    def output(self) -> RequestOutput:
        """Return the result, once all samples have ended."""
        results = [result for result in self.results if result is not None]
        assert len(results) == len(self.results)
        return request_output(self.id, self.prompt, results, self._decode, self._queued_at)

    def first_result(self) -> SampleResult:
        """Return the result of the first sample, once it has ended."""
        (result, *_) = self.results
        assert result is not None
        return result

    def without_tokens(self, number: int, reason: FinishReason, stop_reason: str | None) -> SampleResult:
        """Return the result of a sample that no replica has computed."""
        params, log = self.prompt.params, CandidatesLog()
        return SampleResult(
            number,
            text="",
            token_ids=[],
            finish_reason=reason,
            stop_reason=stop_reason,
            weights_versions=[(0, self._version)],
            finished_at=time.perf_counter(),
            logprobs=None if params.logprobs is None else log,
            prompt_logprobs=None if params.prompt_logprobs is None or number else log,
            kept_tokens=[] if params.kept_tokens else None,
        )


class ReplicaRequests(AnyRequests[ReplicaRequest, StreamedSample]):
    """The requests of several replicas."""

    def __init__(self, replicas: Replicas, config: Config, tokenizer: PreTrainedTokenizerBase | None) -> None:
        super().__init__(replicas.counters)
        self._replicas = replicas
        self._config = config
        self._decode = None if tokenizer is None else decoder(tokenizer, skip_special_tokens=False)
        self._num_added = 0
        self._round = 0  # of requests, from one drop of all to the next
        self._share_anew()

    def _share_anew(self) -> None:
        self._replicas.take_news()  # nobody wants it any more: `ready` says which replicas there are
        self._sharing = Sharing(max(1, int(UNBEGUN * self._config.max_num_seqs)), self._replicas.ready)

    @property
    def num_added(self) -> int:
        """The number of requests that have been added so far, ended ones included."""
        return self._num_added

    def add(self, prompt: Prepared, streams: bool = False) -> ReplicaRequest:
        """Queue a request."""
        request = self._make(prompt, streams)
        self._share(request)
        return request

    def add_all(self, prompts: list[Prepared]) -> list[ReplicaRequest]:
        """Queue the requests of one call; those that may get more tokens begin sooner."""
        requests = [self._make(prompt, streams=False) for prompt in prompts]
        for request in sorted(requests, key=self._most_tokens, reverse=True):
            self._share(request)
        return requests

    def _most_tokens(self, request: ReplicaRequest) -> int:
        prompt = request.prompt
        room = self._config.max_model_len - len(prompt.token_ids)
        return room if prompt.params.max_tokens is None else min(prompt.params.max_tokens, room)

    def _make(self, prompt: Prepared, streams: bool) -> ReplicaRequest:
        id, self._num_added = self._num_added, self._num_added + 1
        block = self._config.cache_layout.prefix_size
        beginning = prompt.params.adapter, prompt.beginning(block)
        key = beginning if len(prompt.token_ids) > block else ("request", id)
        seed = seed_of(prompt.params, self._config.seed, id)
        decode, version = self._decode if prompt.params.detokenize else None, self._replicas.updater.version
        request = self._running[id] = ReplicaRequest(id, prompt, seed, key, streams, decode, version)
        return request

    def _share(self, request: ReplicaRequest) -> None:
        for index in range(request.prompt.params.n):
            self._sharing.add((request.id, index), request.key)

    def step(self) -> list[StepResult]:
        """Hand out samples, and take what replicas tell; returns the figures of their steps."""
        if self._running and not self._replicas.has_news:
            self._hand_out()
            self._replicas.wait_for_news()
        steps: list[StepResult] = []
        for index, news in self._replicas.take_news():
            if news is Change.JOINED:
                self._sharing.join(index)
            elif news is Change.LOST:
                self._begin_again(*self._sharing.leave(index))
            else:
                assert isinstance(news, Report)
                steps += results_of(index, news)
                if news.round == self._round:
                    self._take(index, news)
        self._hand_out()
        return steps

    def _hand_out(self) -> None:
        """Give each replica the samples that it begins next."""
        if not self._sharing.num_waiting:
            return
        for index in self._sharing.replicas:
            units = self._sharing.take(index)
            if units:
                self._replicas.send(index, "take", self._round, self._tasks(units))

    def _tasks(self, units: list[Unit]) -> list[Task]:
        tasks = []
        for number, group in groupby(units, key=itemgetter(0)):
            request, samples = self._running[number], [sample for _, sample in group]
            for first, count in _runs(samples):
                prompt = request.prompt
                tasks.append(Task(number, prompt.prompt, prompt.params, request.seed, first, count, request.streams))
        return tasks

    def _take(self, index: int, report: Report) -> None:
        self._sharing.begin(index, report.begun)
        for number, results in report.ended:
            for result in results:
                if self._sharing.end(index, (number, result.number)):
                    self._end(self._running[number], result)
        for number, sample, piece in report.pieces:
            request = self._running[number]
            streamed = request.samples[sample]
            streamed.tell(piece)
            if piece["finish_reason"] is not None and self._sharing.end(index, (number, sample)):
                self._end_sample(request, piece["finish_reason"])
            self._changed.append(streamed)

    def _end(self, request: ReplicaRequest, result: SampleResult) -> None:
        request.results[result.number] = result
        self._end_sample(request, result.finish_reason)

    def _begin_again(self, again: list[Unit], given_up: list[Unit]) -> None:
        """Let samples of a dead replica wait for another, and end those that have seen two die."""
        for number, index in given_up:
            self._end_here(self._running[number], index, "error", GIVEN_UP)
        for number, index in again:
            request = self._running[number]
            if request.is_aborted and self._sharing.discard((number, index), request.key):
                self._end_here(request, index, "abort", None)
            elif request.streams:
                request.samples[index].begin_again()

    def _end_here(self, request: ReplicaRequest, index: int, reason: FinishReason, stop_reason: str | None) -> None:
        """End a sample that no replica has."""
        if request.streams:
            sample = request.samples[index]
            sample.end(reason, stop_reason)
            self._end_sample(request, reason)
            self._changed.append(sample)
        else:
            self._end(request, request.without_tokens(index, reason, stop_reason))

    def before_new_weights(self, in_flight: Fate, adapter: str | None = None) -> Callable[[], None]:
        """Return the function that ends requests after new weights came, if in_flight says so; replicas do the rest."""
        check_choice("in_flight", in_flight, list(get_args(Fate)))

        def prepare() -> None:
            if in_flight == "abort":
                with self:
                    for request in self._affected(adapter):
                        self.abort(request)

        return prepare

    def _abort(self, request: ReplicaRequest) -> None:
        """End the samples that wait, and let the replicas end theirs: `step` gets these."""
        request.is_aborted = True
        for index in range(request.prompt.params.n):
            if self._sharing.discard((request.id, index), request.key):
                self._end_here(request, index, "abort", None)
        if request.num_running:
            self._replicas.tell_all("abort", request.id)

    def _drop(self) -> None:
        self._round += 1
        self._replicas.tell_all("drop")
        self._share_anew()


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    """Cut rising numbers into runs without a gap; returns the first and the length of each."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and sum(runs[-1]) == number:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((number, 1))
    return runs
