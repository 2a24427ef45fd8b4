"""Functions that callers give a request: each changes the logits of its row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nanoinfer.logits_processors import Function, name_of, num_parameters
from nanoinfer.runner.logits.lines import Which
from nanoinfer.runner.message import LogitsMessage

MINUS_INFINITY = float("-inf")
NOT_FINITE = "returned logits of which some are NaN or infinite: must be finite, or -inf for what may not be drawn"


class FunctionError(Exception):
    """A function failed, or has returned what are no logits."""


def make_functions(
    messages: list[LogitsMessage], device: torch.device
) -> Callable[[Tensor, Tensor, Tensor | None, Which], Tensor]:
    """Return what calls the functions of rows, as Penalty.make does. A row whose function fails gets only -inf.

    Its message says why, in `fault`. The host waits for the device here: functions get tokens as lists.
    """
    own = [message.params.logits_processors or () for message in messages]

    def change(logits: Tensor, positions: Tensor, tokens: Tensor | None, rows: Which) -> Tensor:
        assert tokens is not None
        changed, known, ends = logits.clone(), tokens.cpu().numpy(), positions.tolist()
        of_lines = range(len(messages)) if isinstance(rows, slice) else rows.tolist()
        flags: list[tuple[int, Function, Tensor]] = []
        for line, row in enumerate(of_lines):
            token_ids = known[line, : ends[line]].tolist() if own[row] else []
            start = messages[row].num_prompt_tokens
            for function in own[row]:
                try:
                    changed[line] = _call(function, token_ids[:start], token_ids[start:], changed[line])
                except Exception as error:
                    _fail(changed, line, messages[row], function, str(error) or type(error).__name__)
                    break
                most = changed[line].amax()
                flags.append((line, function, most.isnan() | most.isposinf()))
        spoiled = torch.stack([flag for *_, flag in flags]).tolist() if flags else []
        for (line, function, _), is_spoiled in zip(flags, spoiled, strict=True):
            if is_spoiled and messages[of_lines[line]].fault is None:
                _fail(changed, line, messages[of_lines[line]], function, NOT_FINITE)
        return changed

    return change


def _call(function: Function, prompt: list[int], output: list[int], logits: Tensor) -> Tensor:
    """Call a function. Raises FunctionError if it returns no logits, and what it raises itself."""
    has_three = num_parameters(function) == 3
    result = function(prompt, output, logits) if has_three else function(prompt + output, logits)
    if not isinstance(result, Tensor) or result.shape != logits.shape:
        shown = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise FunctionError(f"returned {shown}: must return logits of shape {list(logits.shape)}")
    return result


def _fail(changed: Tensor, line: int, message: LogitsMessage, function: Function, why: str) -> None:
    changed[line] = MINUS_INFINITY
    message.fault = f"logits_processors: {name_of(function)}: {why}"
