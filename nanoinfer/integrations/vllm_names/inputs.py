"""Prompts and requests for adapters, as vLLM's programs write them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

from nanoinfer.requests.inputs import Prompt

PromptType = Prompt


class TextPrompt(TypedDict, total=False):
    """A prompt's text; what else vLLM allows beside it, generate checks."""

    prompt: str
    multi_modal_data: Any
    multi_modal_uuids: Any
    mm_processor_kwargs: Any


class TokensPrompt(TypedDict, total=False):
    """A prompt's tokens; what else vLLM allows beside them, generate checks."""

    prompt_token_ids: list[int]
    prompt: str
    multi_modal_data: Any
    multi_modal_uuids: Any
    mm_processor_kwargs: Any


@dataclass(frozen=True)
class LoRARequest:
    """An adapter that a program asks for.

    lora_name, lora_int_id: the adapter's name and number
    lora_path: its folder
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
