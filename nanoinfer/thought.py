"""Thought: where a sample's reasoning begins and ends, in tokens, and after how many of them it is closed."""

from __future__ import annotations

from typing import NamedTuple


class Thought(NamedTuple):
    """The markers of one request's thought, as the engine reads them.

    opening, closing: the tokens that open a thought, and that close it
    leaving: the tokens that close it from anywhere in its midst; they end with `closing`
    budget: the engine puts `leaving` behind so many tokens of the thought; None: nobody closes it but the model
    is_open: the prompt ends in an open thought
    has_form: structured outputs bind what stands behind the thought; None: if the prompt ends in an open one
    """

    opening: tuple[int, ...]
    closing: tuple[int, ...]
    leaving: tuple[int, ...]
    budget: int | None = None
    is_open: bool = False
    has_form: bool | None = False
