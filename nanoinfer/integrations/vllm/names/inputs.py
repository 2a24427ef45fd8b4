"""Prompts as vLLM's programs write them."""

from __future__ import annotations

from typing import Any, TypedDict

from nanoinfer.requests.inputs import Prompt

PromptType = Prompt


class TextPrompt(TypedDict, total=False):
    """A prompt's text; what else vLLM allows beside it, generate checks."""

    prompt: str
    multi_modal_data: Any
    multi_modal_uuids: Any
    mm_processor_kwargs: Any
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt's tokens; what else vLLM allows beside them, generate checks."""

    prompt_token_ids: list[int]
    prompt: str
    multi_modal_data: Any
    multi_modal_uuids: Any
    mm_processor_kwargs: Any
    cache_salt: str
