"""Thoughts of requests: what the engine is told of them, by the settings and by the prompt."""

from __future__ import annotations

from copy import copy

from nanoinfer.requests.reasoning.reasoning import Reasoning
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.structured_outputs import REASONING
from nanoinfer.thought import Thought

PASS = "pass LLM(reasoning_markers=(opening, closing)), such as ('<think>', '</think>')"


def find_thought(name: str, params: SamplingParams, reasoning: Reasoning | None) -> Thought | None:
    """Return what the engine is to do with the thoughts of requests with these settings; None: nothing.

    name: begins the messages of errors; reasoning: the LLM's

    Raises ValueError if the settings need markers that there are not.
    """
    form, budget = params.structured_outputs, params.thinking_token_budget
    has_form = False if form is None else form.get(REASONING)
    thought = None if reasoning is None else reasoning.thought(budget, has_form)
    wishes = {"thinking_token_budget": budget, f"structured_outputs[{REASONING!r}]": has_form or None}
    for wish, value in wishes.items():
        if value is not None and thought is None:
            lacking = "there are none" if reasoning is None else "the model's tokens cannot write them"
            raise ValueError(f"{name}.{wish}={value}: needs the markers of a thought, and {lacking}: {PASS}")
    return None if budget is None and has_form is False else thought


def with_prompt(params: SamplingParams, prompt: list[int], reasoning: Reasoning | None) -> SamplingParams:
    """Return the settings of a request by where its prompt ends."""
    if (thought := params.thought) is None:
        return params
    assert reasoning is not None
    is_open = reasoning.is_open(prompt)
    has_form = is_open if thought.has_form is None else thought.has_form
    is_bound = params.is_guided and not has_form  # a form that binds the first token leaves no room for a thought
    needed = thought._replace(is_open=is_open, has_form=has_form, budget=None if is_bound else thought.budget)
    params = copy(params)  # which other prompts have, too
    vars(params)["thought"] = needed if has_form or needed.budget is not None else None
    return params
