"""Outputs: the dictionaries that requests return. Their keys are attributes too."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, wraps
from math import isnan
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from nanoinfer.engine.sequence import FinishReason
from nanoinfer.logprob import LogProb

log = logging.getLogger("nanoinfer")


class Later:
    """A value of an Output that is made when somebody first reads it: many never do, and it takes long."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    @cached_property
    def value(self) -> Any:
        """The value."""
        return self._make()


class Output(dict[str, Any]):
    """A dictionary that answers by attributes too: output.text is output["text"].

    A subclass annotates its keys. Whoever reads a value that is a Later gets what it makes.
    """

    __slots__ = ()

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if isinstance(value, Later):
            value = self[key] = value.value
        return value

    if not TYPE_CHECKING:  # a type checker then knows the annotated names alone, and finds a wrong one

        def __getattr__(self, name: str) -> Any:
            try:
                return self[name]
            except KeyError:
                properties = [own for own in dir(type(self)) if not own.startswith("_") and not hasattr(dict, own)]
                known = ", ".join([*self, *properties])
                raise AttributeError(f"{type(self).__name__} has no {name!r}; known: {known}") from None


def _reading_all(name: str) -> Callable[..., Any]:
    """Return dict's method of this name, which first reads all values of its arguments as `[]` does."""
    method: Callable[..., Any] = getattr(dict, name)

    @wraps(method)
    def read_all(*args: Any) -> Any:
        for output in args:
            if isinstance(output, Output):
                for key in dict.keys(output):
                    output[key]
        return method(*args)

    return read_all


OPERATORS = ("__eq__", "__iter__", "__ne__", "__or__", "__repr__", "__ror__")  # __iter__: {**output} then reads by []
METHODS = ("copy", "get", "items", "pop", "popitem", "setdefault", "values")
for _name in OPERATORS + METHODS:
    setattr(Output, _name, _reading_all(_name))


class SampleOutput(Output):
    """One sample of a prompt, a dictionary whose keys are attributes too.

    index: the sample's number among its prompt's, from 0 to n - 1
    text: the generated text, without special tokens and without a stop string, unless SamplingParams keeps them. It
        begins where the prompt ends, so that a first space stays, which many tokenizers drop from a whole text. A
        checkpoint's clean_up_tokenization_spaces does not change it. It is empty without a tokenizer, and with
        detokenize=False
    reasoning: what of the text is the thought, without the markers that stand around it. A thought that nobody closed
        goes on to the end. None if the LLM knows no markers: see its reasoning_markers
    answer: what of the text is no thought, without markers; the text if the LLM knows none
    token_ids: all generated tokens; the last may be an end-of-sequence token or a stop token
    finish_reason: "stop" for a stop string, a stop token or an end of sequence; "length" at max_tokens or
        max_model_len; "abort" after llm.abort; "error" when the text could not be made, its grammar grew too complex,
        or the model's logits were not finite, which ends this sample alone
    stop_reason: the stop string or stop token that ended the sample, or the error's message; otherwise None
    weights_versions: pairs (first, version): from token_ids[first] on, llm.weights_version was `version`; there are
        several pairs if llm.update_weights or llm.load_weights came in between
    logprobs: for each generated token a mapping from token ids to a LogProb, the token itself always among them;
        None if SamplingParams did not ask
    kept_tokens: for each generated token, how many tokens could have been drawn in its place, and a logarithm: of the
        probability that these had together at this temperature. The others are those that min_tokens,
        allowed_token_ids, bad_words, a form (structured_outputs) or filters left out. At temperature 0 it is one token,
        and 0.0. None if SamplingParams did not ask
    entropies: for each generated token the entropy, in nats, of the distribution that it was drawn from: behind
        penalties, bias, masks, temperature and filters. At temperature 0 it is 0.0. None if SamplingParams did not ask
    routed_experts: the experts that each token of prompt and output took, the likeliest first, in the layers that have
        experts: [tokens, layers, experts a token uses] uint8, or int16 where a router chooses among more than 256.
        Numbers behind the experts' are LongCat-Flash's identities. The last generated token took none yet. None without
        LLM's routed_experts
    hidden_states: for each number of SamplingParams' hidden_states, a tensor on the host, [tokens, hidden_size] in the
        model's dtype: that of each token of prompt and output but the last generated one; with max_tokens=0, of all
        tokens of the prompt. None if SamplingParams did not ask
    num_proposed_tokens: guesses that were verified for this sample; 0 without LLM's speculation
    num_accepted_tokens: those of token_ids that had been guessed

    A SampleOutput has one more attribute, which is no key:

    cumulative_logprob: the sum of the generated tokens' log-probabilities; None if SamplingParams did not ask
    """

    __slots__ = ()

    index: int
    text: str
    reasoning: str | None
    answer: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None
    weights_versions: list[tuple[int, int]]
    logprobs: list[Mapping[int, LogProb]] | None
    kept_tokens: list[tuple[int, float]] | None
    entropies: list[float] | None
    routed_experts: npt.NDArray[np.integer[Any]] | None
    hidden_states: dict[int, Tensor] | None
    num_proposed_tokens: int
    num_accepted_tokens: int

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the generated tokens' log-probabilities."""
        if self.logprobs is None:
            return None
        return sum(entry[token_id] for entry, token_id in zip(self.logprobs, self.token_ids, strict=True))


class Timings(Output):
    """When four things happened to a request, in seconds on time.perf_counter's clock.

    queued: the request was added
    started: the first step of its first sample was launched; None if the request ended before
    first_token: its first token was read back from the device; None if it ended before
    finished: its last token was read back, or it was aborted

    Timings have these attributes too, which are no keys:

    queue_seconds: from queued to started; None if it never started
    first_token_seconds: from queued to the first token, often called TTFT; None if it had none
    generation_seconds: from the first token to the end of all samples; None if it had none
    """

    __slots__ = ()

    queued: float
    started: float | None
    first_token: float | None
    finished: float

    @property
    def queue_seconds(self) -> float | None:
        """The seconds from queued to started."""
        return None if self.started is None else self.started - self.queued

    @property
    def first_token_seconds(self) -> float | None:
        """The seconds from queued to the first token."""
        return None if self.first_token is None else self.first_token - self.queued

    @property
    def generation_seconds(self) -> float | None:
        """The seconds from the first token to the end of all samples."""
        return None if self.first_token is None else self.finished - self.first_token


class RequestOutput(SampleOutput):
    """One prompt's result, a dictionary: the keys of SampleOutput, for the first sample, and these.

    request_id: the number that add_request returned; generate, chat and stream number their requests too
    prompt: the prompt's text, for a chat as its template wrote it; None if the prompt was token ids
    prompt_token_ids: the prompt's tokens, in which each image has as many placeholders as it has embeddings
    prompt_logprobs: like logprobs, for each token of the prompt; None for the first token, which nothing precedes, and
        for tokens before prompt_logprobs_start; None as a whole if SamplingParams did not ask
    num_cached_tokens: this many tokens of the prompt came from the KV cache
    timings: when the request was queued, started, had its first token, and ended, and the seconds between
    samples: all n samples, the first included

    A RequestOutput has these attributes too, which are no keys, by vLLM's names:

    outputs: the samples
    finished: True: a request gives its output once all its samples have ended
    """

    __slots__ = ()

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[Mapping[int, LogProb] | None] | None
    num_cached_tokens: int
    timings: Timings
    samples: list[SampleOutput]

    @property
    def outputs(self) -> list[SampleOutput]:
        """The samples."""
        return self.samples

    @property
    def finished(self) -> bool:
        """True: a request gives its output once all its samples have ended."""
        return True


class StreamOutput(Output):
    """One sample's new text and tokens since its previous StreamOutput, a dictionary whose keys are attributes too.

    request_id: the request's number, for abort
    index: the prompt's place in the list that was passed to stream
    sample: the sample's number among its prompt's, from 0 to n - 1
    text: the new text: whole characters only, and nothing that may turn out to be the beginning of a stop string
    reasoning: the new text of the thought, as in SampleOutput, and nothing that may turn out to be the beginning of a
        marker. What is told of both parts says of which a piece is
    answer: the new text of the answer, likewise
    token_ids: the new tokens
    finish_reason: as in SampleOutput, in the sample's last output; None before
    stop_reason: as in SampleOutput, in the sample's last output; None before
    weights_versions: as in SampleOutput, for all tokens so far
    logprobs: as in SampleOutput, for the new tokens
    kept_tokens: as in SampleOutput, for the new tokens
    entropies: as in SampleOutput, for the new tokens
    routed_experts: as in SampleOutput, in the sample's last output; None before
    hidden_states: as in SampleOutput, in the sample's last output; None before
    prompt_logprobs: as in RequestOutput, in the first output of a prompt's first sample; None otherwise
    """

    __slots__ = ()

    request_id: int
    index: int
    sample: int
    text: str
    reasoning: str | None
    answer: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    weights_versions: list[tuple[int, int]]
    logprobs: list[Mapping[int, LogProb]] | None
    kept_tokens: list[tuple[int, float]] | None
    entropies: list[float] | None
    routed_experts: npt.NDArray[np.integer[Any]] | None
    hidden_states: dict[int, Tensor] | None
    prompt_logprobs: list[Mapping[int, LogProb] | None] | None


class Score(Output):
    """A continuation's log-probability behind its prompt, a dictionary whose keys are attributes too.

    logprob: the sum of its tokens' log-probabilities; NaN if the model's logits are not finite
    is_greedy: whether no other token is likelier than the continuation's, in any place; False if some are NaN
    token_ids: its tokens
    hidden_states: those of all tokens of prompt and continuation, as in SampleOutput; None if the call did not ask
    logprobs: each token's log-probability, which knows the token's rank and text
    """

    __slots__ = ()

    logprob: float
    is_greedy: bool
    token_ids: list[int]
    hidden_states: dict[int, Tensor] | None
    logprobs: list[LogProb]


def score_of(output: RequestOutput) -> Score:
    """Return the score of those tokens of a prompt whose log-probabilities the output has.

    Raises RuntimeError if the request has ended with an error.
    """
    if output.finish_reason == "error":
        raise RuntimeError(str(output.stop_reason))
    assert output.prompt_logprobs is not None
    places = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    scored = [(token_id, entry[token_id]) for token_id, entry in places if entry is not None]
    token_ids, logprobs = [token_id for token_id, _ in scored], [logprob for _, logprob in scored]
    is_greedy = all(logprob.rank == 1 and not isnan(logprob) for logprob in logprobs)
    return Score(
        logprob=sum(logprobs),
        is_greedy=is_greedy,
        token_ids=token_ids,
        hidden_states=output.hidden_states,
        logprobs=logprobs,
    )


def warn_of_errors(outputs: Iterable[RequestOutput]) -> None:
    """Log a warning if samples have ended with an error, for callers that look at texts or tokens alone."""
    samples = [sample for output in outputs for sample in output.samples]
    reasons = [sample.stop_reason for sample in samples if sample.finish_reason == "error"]
    if reasons:
        log.warning(f"{len(reasons):,} of {len(samples):,} samples have ended early, with an error: {reasons[0]}")
