"""What comes of a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from nanoinfer.engine.sequence import FinishReason


class SampleOutput(TypedDict):
    """One sample of a prompt.

    text: without special tokens, and without what stopped it, if SamplingParams does not say otherwise; as the tokens
        spell it, whatever clean_up_tokenization_spaces a checkpoint sets; empty when the model has no tokenizer
    token_ids: all that were generated, the end-of-sequence or stop token included
    finish_reason: "stop", "length", "abort", or "error" for what went wrong in this request alone
    stop_reason: the stop token or stop string; None for an end of sequence; for an error what it says
    logprobs: for each token the log-probabilities of itself and of the most likely ones, if asked for
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None
    logprobs: list[Mapping[int, float]] | None


class Timings(TypedDict):
    """When a request was queued, had its first token, and had its last; in seconds, on time.perf_counter's clock.

    None: it never came so far.
    """

    queued: float
    first_token: float | None
    finished: float


class RequestOutput(SampleOutput):
    """One prompt's result: its first sample's fields, and what belongs to all of its samples.

    prompt_logprobs: as `logprobs`, for each token of the prompt; None for the first, which nothing precedes
    num_cached_tokens: tokens of the prompt that were in the KV cache already
    samples: all n of them
    """

    request_id: int
    prompt_logprobs: list[Mapping[int, float] | None] | None
    num_cached_tokens: int
    timings: Timings
    samples: list[SampleOutput]


class StreamOutput(TypedDict):
    """What is new of one sample.

    index: the prompt's, among those of the call; sample: which of its samples, from 0
    text: the new text, whole characters that no stop string will take back; token_ids: the new tokens
    finish_reason, stop_reason: as in SampleOutput, with the sample's last text; None before
    logprobs: of the new tokens, if asked for; prompt_logprobs: as in RequestOutput, with the first of a prompt's first
        sample, else None
    """

    request_id: int
    index: int
    sample: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    logprobs: list[Mapping[int, float]] | None
    prompt_logprobs: list[Mapping[int, float] | None] | None
