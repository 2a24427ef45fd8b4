"""Outputs: the dictionaries that requests return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from nanoinfer.engine.sequence import FinishReason


class SampleOutput(TypedDict):
    """One sample of a prompt.

    text: the generated text, without special tokens and without a stop string, unless SamplingParams keeps them; a
        checkpoint's clean_up_tokenization_spaces does not change it; empty without a tokenizer, and with
        detokenize=False
    token_ids: all generated tokens; the last may be an end-of-sequence token or a stop token
    finish_reason: "stop" for a stop string, a stop token or an end of sequence; "length" at max_tokens or
        max_model_len; "abort" after llm.abort; "error" when the text could not be made, which ends this sample alone
    stop_reason: the stop string or stop token that ended the sample, or the error's message; otherwise None
    logprobs: for each generated token a mapping from token ids to log-probabilities, the token itself always among
        them; None if SamplingParams did not ask
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None
    logprobs: list[Mapping[int, float]] | None


class Timings(TypedDict):
    """When three things happened to a request, in seconds on time.perf_counter's clock.

    queued: the request was added
    first_token: its first token was read back from the device; None if it ended before
    finished: its last token was read back, or it was aborted
    """

    queued: float
    first_token: float | None
    finished: float


class RequestOutput(SampleOutput):
    """One prompt's result, a dictionary: the keys of SampleOutput, for the first sample, and these.

    request_id: the number that add_request returned; generate, chat and stream number their requests too
    prompt_logprobs: like logprobs, for each token of the prompt; None for the first token, which nothing precedes;
        None as a whole if SamplingParams did not ask
    num_cached_tokens: this many tokens of the prompt came from the KV cache
    timings: when the request was queued, had its first token, and ended
    samples: all n samples, the first included
    """

    request_id: int
    prompt_logprobs: list[Mapping[int, float] | None] | None
    num_cached_tokens: int
    timings: Timings
    samples: list[SampleOutput]


class StreamOutput(TypedDict):
    """One sample's new text and tokens since its previous StreamOutput, a dictionary.

    request_id: the request's number, for abort
    index: the prompt's place in the list that was passed to stream
    sample: the sample's number among its prompt's, from 0 to n - 1
    text: the new text: whole characters only, and nothing that may turn out to be the beginning of a stop string
    token_ids: the new tokens
    finish_reason: as in SampleOutput, in the sample's last output; None before
    stop_reason: as in SampleOutput, in the sample's last output; None before
    logprobs: as in SampleOutput, for the new tokens
    prompt_logprobs: as in RequestOutput, in the first output of a prompt's first sample; None otherwise
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
