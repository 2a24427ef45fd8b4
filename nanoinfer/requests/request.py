"""Request: a prompt on its way, with what is known of its samples, and the outputs that are made of it."""

from __future__ import annotations

import time
from typing import Any

from nanoinfer.logprob import CandidatesLog, Decode
from nanoinfer.requests.outputs import RequestOutput, StreamOutput
from nanoinfer.requests.prompts import Prepared
from nanoinfer.requests.tasks.messages import Task
from nanoinfer.requests.tasks.results import SampleResult, prompt_logprobs, request_output
from nanoinfer.sampling_params import SamplingParams

GROWING = ("text", "token_ids", "logprobs", "kept_tokens")  # of results that stream: each goes on where the last ended


class StreamedSample:
    """A sample that streams: what results have told of it, and how much of that the caller has taken.

    If its replica dies, another one tells all again from the beginning, and the caller gets the rest alone.
    """

    __slots__ = ("_decode", "_newest", "_num_taken", "_params", "_prompt_logprobs", "_request_id", "_told")

    def __init__(self, request_id: int, params: SamplingParams, decode: Decode | None) -> None:
        """decode: makes text of tokens"""
        self._request_id, self._params, self._decode = request_id, params, decode
        self._num_taken = dict.fromkeys(GROWING, 0)
        self._newest: SampleResult | None = None
        self.begin_again()

    def begin_again(self) -> None:
        """Forget what has been told: the replica is dead, and another one tells it again."""
        params = self._params
        self._told: dict[str, Any] = {
            "text": "",
            "token_ids": [],
            "logprobs": None if params.logprobs is None else [],
            "kept_tokens": [] if params.kept_tokens else None,
        }
        self._prompt_logprobs: CandidatesLog | None = None

    def extend(self, new: SampleResult) -> None:
        """Take what is new."""
        self._newest, told = new, self._told
        told["text"] += new.text
        told["token_ids"] += new.token_ids
        if new.logprobs is not None:
            told["logprobs"] += new.logprobs.logprobs(self._decode)
        if new.kept_tokens is not None:
            told["kept_tokens"] += new.kept_tokens
        if new.prompt_logprobs is not None:
            self._prompt_logprobs = new.prompt_logprobs

    def take_new(self, index: int) -> StreamOutput:
        """Return the text and tokens since the last call; index: the prompt's place in the list given to LLM.stream."""
        newest, num_taken, is_first = self._newest, self._num_taken, not self._num_taken["token_ids"]
        assert newest is not None
        new: dict[str, Any] = dict.fromkeys(GROWING)
        for name, told in self._told.items():
            if told is not None:
                new[name] = told[num_taken[name] :]
                num_taken[name] = max(num_taken[name], len(told))
        return StreamOutput(
            request_id=self._request_id,
            index=index,
            sample=newest.number,
            text=new["text"],
            token_ids=new["token_ids"],
            finish_reason=newest.finish_reason,
            stop_reason=newest.stop_reason,
            weights_versions=newest.weights_versions,
            logprobs=new["logprobs"],
            kept_tokens=new["kept_tokens"],
            routed_experts=newest.routed_experts,
            prompt_logprobs=prompt_logprobs(self._params, self._prompt_logprobs, self._decode) if is_first else None,
        )


class Request:
    """A prompt and the results of its samples.

    id: its number among the LLM's requests
    samples: those of a request that streams
    num_running: how many samples have not ended
    """

    __slots__ = ("_decode", "_queued_at", "id", "num_running", "prompt", "results", "samples", "seed")

    def __init__(self, id: int, prompt: Prepared, seed: int, streams: bool, decode: Decode | None) -> None:
        """decode: makes text of tokens"""
        params = prompt.params
        self.id, self.prompt, self.seed = id, prompt, seed
        self._decode = decode if params.detokenize else None
        self.samples = [StreamedSample(id, params, self._decode) for _ in range(params.n)] if streams else []
        self.num_running = params.n
        self.results: list[SampleResult | None] = [None] * params.n
        self._queued_at = time.perf_counter()

    def task(self) -> Task:
        """Return what is to be computed."""
        prompt, params = self.prompt.prompt, self.prompt.params
        return Task(self.id, prompt, params, self.seed, range(params.n), bool(self.samples), self.prompt.grammar)

    def output(self) -> RequestOutput:
        """Return the result, once all samples have ended."""
        results = [result for result in self.results if result is not None]
        assert len(results) == len(self.results)
        return request_output(self.id, self.prompt, results, self._decode, self._queued_at)

    def first_result(self) -> SampleResult:
        """Return the result of the first sample, once it has ended."""
        result = self.results[0]
        assert result is not None
        return result
