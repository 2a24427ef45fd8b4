"""BeamSearchParams: how wide LLM.beam_search searches, how far, and which of its finds count as the best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from nanoinfer.checks import as_number, check_adapter, check_flag, check_int, check_none, check_number, short
from nanoinfer.hints import hints_for

MOST_BEAMS = 10**6  # each is a sequence of its own
MOST_PENALTY = 32  # no number of tokens to this power overflows


@hints_for("BeamSearchParams", ("beam_width", "length_penalty", "early_stopping"))
@dataclass
class BeamSearchParams:
    """How LLM.beam_search searches. vLLM uses the same names, and early_stopping is transformers'.

    Settings may be assigned, and are checked then too.

    beam_width: this many beams of a prompt go on after each step, and the output has as many sequences; 1: the search
        takes the likeliest tokens up to an end-of-sequence token
    max_tokens: a beam ends after this many generated tokens, or sooner where max_model_len is reached
    ignore_eos: True: a beam goes on after an end-of-sequence token
    temperature: 0 or 1, which both mean the model's own log-probabilities: beams are not drawn
    length_penalty: a sequence's score is its cum_logprob divided by its number of generated tokens to this power, from
        -32 to 32; above 0 it helps long sequences
    include_stop_str_in_output: True: the text keeps the end-of-sequence token, if skip_special_tokens=False shows it
    structured_outputs: None, which vLLM's callers may pass
    skip_special_tokens: True: the text leaves out special tokens
    watermarking: None or False, as for structured_outputs
    allowed_token_ids: None, as for structured_outputs
    early_stopping: when a search ends before max_tokens, once beam_width beams have come to an end-of-sequence token.
        True: at once. False: when the best beam that goes on has no better score, at its present length, than the worst
        that has ended. "never": when it could not get a better one at any length up to max_tokens
    adapter: the name of the adapter that computes the beams: see llm.load_adapter(...); None: the model alone does

    Raises a ValueError that names the setting, its value and the range, if a setting is out of its range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: None = None
    skip_special_tokens: bool = True
    watermarking: Literal[False] | None = None
    allowed_token_ids: None = None
    early_stopping: bool | Literal["never"] = False
    adapter: str | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in CHECKS:
            raise AttributeError(f"BeamSearchParams has no setting {name!r}; known: {', '.join(CHECKS)}")
        object.__setattr__(self, name, CHECKS[name](name, value))


def _check_temperature(name: str, value: Any) -> float:
    number = as_number(value)
    if number not in (0, 1):
        raise ValueError(
            f"{name}={short(value)}: must be 0 or 1: beams are not drawn; SamplingParams(temperature=..., n=...) with"
            " generate draws"
        )
    return float(number)


def _check_watermarking(name: str, value: Any) -> None:
    if value is not None and check_flag(name, value):
        raise ValueError(f"{name}={short(value)}: must be None or False: there is no watermark here")


def _check_early_stopping(name: str, value: Any) -> bool | str:
    if isinstance(value, str):
        if value != "never":
            raise ValueError(f"{name}={short(value)}: must be True, False or 'never'")
        return "never"
    return check_flag(name, value)


CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "beam_width": partial(check_int, low=1, high=MOST_BEAMS),
    "max_tokens": partial(check_int, low=1),
    "ignore_eos": check_flag,
    "temperature": _check_temperature,
    "length_penalty": partial(
        check_number, low=-MOST_PENALTY, high=MOST_PENALTY, what=f"from -{MOST_PENALTY} to {MOST_PENALTY}"
    ),
    "include_stop_str_in_output": check_flag,
    "structured_outputs": partial(check_none, why="beams have no grammar; SamplingParams(structured_outputs=...) has"),
    "skip_special_tokens": check_flag,
    "watermarking": _check_watermarking,
    "allowed_token_ids": partial(check_none, why="beams may take any token"),
    "early_stopping": _check_early_stopping,
    "adapter": check_adapter,
}
"""Each setting's check, which returns the value in Python's own types."""
