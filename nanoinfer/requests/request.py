"""Request: a prompt on its way, with what is known of its samples, and the outputs that are made of it."""

from __future__ import annotations

import time

from nanoinfer.logprob import Decode
from nanoinfer.requests.outputs import RequestOutput
from nanoinfer.requests.prompts.stages import Prepared
from nanoinfer.requests.reasoning.reasoning import Reasoning
from nanoinfer.requests.tasks.messages import Task
from nanoinfer.requests.tasks.results import SampleResult, request_output
from nanoinfer.requests.tasks.streamed import StreamedSample


class Request:
    """A prompt and the results of its samples.

    id: its number among the LLM's requests
    samples: those of a request that streams
    num_running: how many samples have not ended
    """

    __slots__ = ("_decode", "_queued_at", "_reasoning", "id", "num_running", "prompt", "results", "samples", "seed")

    def __init__(
        self,
        id: int,
        prompt: Prepared,
        seed: int,
        streams: bool,
        decode: Decode | None,
        reasoning: Reasoning | None = None,
    ) -> None:
        """decode: makes text of tokens; reasoning: divides it; None: the LLM knows no markers"""
        params = prompt.params
        self.id, self.prompt, self.seed = id, prompt, seed
        self._decode = decode if params.detokenize else None
        self._reasoning = reasoning
        self.samples = [self._streamed() for _ in range(params.n)] if streams else []
        self.num_running = params.n
        self.results: list[SampleResult | None] = [None] * params.n
        self._queued_at = time.perf_counter()

    def _streamed(self) -> StreamedSample:
        prompt, reasoning = self.prompt, self._reasoning
        parts = None if reasoning is None else reasoning.parts(prompt.token_ids, prompt.params)
        return StreamedSample(self.id, prompt.params, self._decode, parts)

    @property
    def num_texts(self) -> int:
        """How many prompts it consists of."""
        return len(self.prompt.texts) or 1

    def task(self) -> Task:
        """Return what is to be computed."""
        prompt, params = self.prompt.prompt, self.prompt.params
        return Task(self.id, prompt, params, self.seed, range(params.n), bool(self.samples), self.prompt.grammar)

    def output(self) -> RequestOutput:
        """Return the result, once all samples have ended."""
        results = [result for result in self.results if result is not None]
        assert len(results) == len(self.results)
        return request_output(self.id, self.prompt, results, self._decode, self._reasoning, self._queued_at)

    def first_result(self) -> SampleResult:
        """Return the result of the first sample, once it has ended."""
        result = self.results[0]
        assert result is not None
        return result
