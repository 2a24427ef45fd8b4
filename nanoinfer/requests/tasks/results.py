"""Results: what is known of a sample, and the outputs that are made of it when it has ended."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from nanoinfer.engine.results.hidden_states import HiddenStates
from nanoinfer.engine.results.routed_experts import ExpertIds
from nanoinfer.engine.sequence import FinishReason, Vector
from nanoinfer.logprob import CandidatesLog, Decode, LogProb
from nanoinfer.requests.outputs import Later, RequestOutput, SampleOutput, Timings
from nanoinfer.requests.prompts.stages import Prepared
from nanoinfer.requests.reasoning.reasoning import Reasoning
from nanoinfer.sampling_params import SamplingParams

Split = Callable[[list[int], str], tuple[str, str]]


class SampleResult(NamedTuple):
    """A sample that has ended, or what one that streams has new, as plain data, which can cross to another process.

    number: the sample's among its prompt's
    text, token_ids, finish_reason, stop_reason, weights_versions, kept_tokens, entropies, routed_experts,
        num_proposed_tokens, num_accepted_tokens: as SampleOutput has them
    num_cached_tokens: this many tokens of the prompt came from the KV cache
    started_at, first_token_at, finished_at: on time.perf_counter's clock; 0.0: never
    logprobs: of the generated tokens, if asked for
    prompt_logprobs: of the prompt's tokens, if asked for and if this is the first sample
    hidden_states: of the sample's tokens, if asked for
    pooled: what each text of the sample was read for, [texts, width], if it was, and could be
    """

    number: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    weights_versions: list[tuple[int, int]]
    num_cached_tokens: int = 0
    started_at: float = 0.0
    first_token_at: float = 0.0
    finished_at: float = 0.0
    logprobs: CandidatesLog | None = None
    prompt_logprobs: CandidatesLog | None = None
    kept_tokens: list[tuple[int, float]] | None = None
    entropies: list[float] | None = None
    routed_experts: ExpertIds | None = None
    hidden_states: HiddenStates | None = None
    num_proposed_tokens: int = 0
    num_accepted_tokens: int = 0
    pooled: Vector | None = None

    def output(self, decode: Decode | None, split: Split | None) -> SampleOutput:
        """Return the sample's output; decode: makes text from tokens, None: there is no tokenizer.

        split: divides an output's tokens and text; None: nobody knows markers
        """
        parts = None if split is None else Later(partial(split, self.token_ids, self.text))
        return SampleOutput(
            index=self.number,
            text=self.text,
            reasoning=None if parts is None else Later(lambda: parts.value[0]),
            answer=self.text if parts is None else Later(lambda: parts.value[1]),
            token_ids=self.token_ids,
            finish_reason=self.finish_reason or "abort",
            stop_reason=self.stop_reason,
            weights_versions=self.weights_versions,
            logprobs=None if self.logprobs is None else Later(partial(self.logprobs.logprobs, decode)),
            kept_tokens=self.kept_tokens,
            entropies=self.entropies,
            routed_experts=self.routed_experts,
            hidden_states=None if self.hidden_states is None else self.hidden_states.tensors(),
            num_proposed_tokens=self.num_proposed_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
        )


def prompt_logprobs(params: SamplingParams, log: CandidatesLog | None, decode: Decode | None) -> Later | None:
    """Return the log-probabilities of a prompt's tokens; log: of those tokens that have some."""
    if log is None:
        return None

    def make() -> list[dict[int, LogProb] | None]:
        return [*[None] * max(1, params.prompt_logprobs_start), *log.logprobs(decode)]

    return Later(make)


def request_output(
    request_id: int,
    prompt: Prepared,
    results: list[SampleResult],
    decode: Decode | None,
    reasoning: Reasoning | None,
    queued_at: float,
) -> RequestOutput:
    """Return the output of a request; results: of all its samples, in their order. reasoning: the LLM's"""
    first = results[0]
    split = None if reasoning is None else partial(reasoning.split, prompt.token_ids, prompt.params)
    samples = [result.output(decode, split) for result in results]
    return RequestOutput(
        dict.items(samples[0]),
        request_id=request_id,
        prompt=prompt.text,
        prompt_token_ids=prompt.token_ids,
        prompt_logprobs=prompt_logprobs(prompt.params, first.prompt_logprobs, decode),
        num_cached_tokens=first.num_cached_tokens,
        timings=Timings(
            queued=queued_at,
            started=first.started_at or None,
            first_token=first.first_token_at or None,
            finished=max([result.finished_at for result in results]),
        ),
        samples=samples,
    )
