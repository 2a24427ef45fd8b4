"""How the tokens of one request are chosen and when it ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

MIN_TEMPERATURE = 1e-6  # what is below is greedy: logits divided by it would overflow
LARGEST = 1e30  # of any number: the device computes in float32


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when the request ends.

    vLLM and Hugging Face's generation config use the same names. A SamplingParams never changes: make a variant with
    dataclasses.replace(params, seed=1).

    temperature: the sampler divides the logits by this number before it draws; 0 always takes the most likely token
    max_tokens: a sample ends after this many generated tokens, or sooner where max_model_len is reached
    ignore_eos: a sample goes on after an end-of-sequence token, as benchmarks want
    seed: a request with a seed draws with the same randomness each time, whatever runs beside it; None: the engine
        makes a seed from its own seed and the request's number, so that the same call twice on one LLM differs
    n: the engine generates this many samples of the prompt, which share the prompt's KV cache; each draws for itself
    top_k: the sampler draws among the k most likely tokens, and those as likely as the k-th; 0 or -1: among all
    top_p: the sampler draws among the most likely tokens whose probabilities first add up to top_p, after top_k
    min_p: the sampler leaves out tokens less likely than min_p times the most likely one, after top_p
    repetition_penalty: the sampler divides positive logits by this number, and multiplies negative ones with it, for
        every token so far, the prompt's included (Keskar, 2019)
    presence_penalty: the sampler subtracts this number, from -2 to 2, from the logit of each token generated so far
    frequency_penalty: the sampler subtracts this number, from -2 to 2, once for each time that a token was generated
    logit_bias: the sampler adds to the logit of each token id the number that stands beside the id
    stop: one string, or several; a sample ends with the first of them, and its text ends before the string
    stop_token_ids: a sample ends with one of these tokens too, not only with an end-of-sequence token; its text ends
        before the token, its token_ids with the token
    include_stop_str_in_output: the text ends with the stop string or stop token instead of before it
    min_tokens: before this many generated tokens, no end-of-sequence token, stop token or stop string ends a sample
    logprobs: the output has the log-probability of each generated token, and those of the k most likely tokens; 0:
        of the generated token alone; the model's own logits count, before any setting changes them
    prompt_logprobs: the output has the same for each token of the prompt; the engine takes no prefix from the KV cache
    skip_special_tokens: the text leaves out special tokens
    detokenize: the output has text; without it token ids alone are returned, a little sooner

    Raises ValueError for a setting out of its range, naming the setting, its value and the range.
    """

    temperature: float = 1.0
    max_tokens: int = 64
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    stop: str | Iterable[str] | None = None
    stop_token_ids: Iterable[int] | None = None
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        for setting in fields(self):
            object.__setattr__(self, setting.name, _plain(getattr(self, setting.name)))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}: must be True or False")
        if not _is_number(self.temperature) or not 0 <= self.temperature <= LARGEST:
            raise ValueError(
                f"temperature={self.temperature!r}: must be a number, 0 (greedy) or positive, at most {LARGEST:g}"
            )
        if self.seed is not None and not (_is_int(self.seed) and 0 <= self.seed < 2**63):
            raise ValueError(f"seed={self.seed!r}: must be None or an integer from 0 to 2**63 - 1")
        self._check_lengths()
        self._check_filters()
        self._check_penalties()
        self._check_stops()

    def _check_lengths(self) -> None:
        for name, least in (("max_tokens", 1), ("n", 1), ("min_tokens", 0)):
            value = getattr(self, name)
            if not _is_int(value) or value < least:
                raise ValueError(f"{name}={value!r}: must be an integer of at least {least}")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens}: must be at most max_tokens={self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not (_is_int(value) and value >= 0):
                raise ValueError(f"{name}={value!r}: must be None or an integer of at least 0")

    def _check_filters(self) -> None:
        if not _is_int(self.top_k) or self.top_k < -1:
            raise ValueError(f"top_k={self.top_k!r}: must be a positive integer, or 0 or -1 for all tokens")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p!r}: must be a number above 0, at most 1")
        if not _is_number(self.min_p) or not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p!r}: must be a number from 0 to 1")

    def _check_penalties(self) -> None:
        if not _is_number(self.repetition_penalty) or not 1 / LARGEST <= self.repetition_penalty <= LARGEST:
            raise ValueError(
                f"repetition_penalty={self.repetition_penalty!r}: must be a number from {1 / LARGEST:g} to {LARGEST:g}"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not _is_number(value) or not -2 <= value <= 2:
                raise ValueError(f"{name}={value!r}: must be a number from -2 to 2")
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias={self.logit_bias!r}: must be a mapping from token ids to numbers")
        biases = {_plain(token_id): _plain(bias) for token_id, bias in self.logit_bias.items()}
        for token_id, bias in biases.items():
            if not _is_token_id(token_id) or not _is_number(bias) or not -LARGEST <= bias <= LARGEST:
                raise ValueError(
                    f"logit_bias has {token_id!r}: {bias!r}: must map token ids to numbers from -{LARGEST:g} to"
                    f" {LARGEST:g}"
                )
        object.__setattr__(self, "logit_bias", biases)

    def _check_stops(self) -> None:
        stop, ids = (self.stop,) if isinstance(self.stop, str) else self.stop, self.stop_token_ids
        for name, values, kind in (("stop", stop, "non-empty strings"), ("stop_token_ids", ids, "token ids")):
            try:
                if isinstance(values, (str, bytes, Mapping)):
                    raise TypeError
                entries = () if values is None else tuple(map(_plain, values))
            except TypeError:
                raise ValueError(f"{name}={values!r}: must be a list of {kind}") from None
            for entry in entries:
                if not (_is_text(entry) if name == "stop" else _is_token_id(entry)):
                    raise ValueError(f"{name} has {entry!r}: must be a list of {kind}")
            object.__setattr__(self, name, entries)
        if self.stop and not self.detokenize:
            raise ValueError(f"stop={self.stop!r} needs detokenize=True: the text is searched for it")

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far count for the next one."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is left to chance."""
        return self.temperature < MIN_TEMPERATURE

    @property
    def has_filters(self) -> bool:
        """Whether unlikely tokens are left out of the draw."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def is_plain(self) -> bool:
        """Whether a draw needs no more than logits, temperature and seed, once min_tokens have been generated."""
        return not (self.has_penalties or self.has_filters or self.logit_bias) and self.logprobs is None


def _plain(value: Any) -> Any:
    """NumPy's numbers, and subclasses of numbers and strings, as Python's own."""
    if isinstance(value, np.number):
        return value.item()
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return int(value) if isinstance(value, int) else float(value)
    return value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_token_id(value: Any) -> bool:
    return _is_int(value) and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
