"""Prompts as vLLM's programs write them, and settings with its defaults and under all of its names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, TypedDict

from nanoinfer import sampling_params
from nanoinfer.checks import short
from nanoinfer.requests.inputs import Prompt

PromptType = Prompt

MAX_TOKENS = 16  # vLLM's default


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


class RequestOutputKind(Enum):
    """What an output holds. SamplingParams says which it accepts."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass
class StructuredOutputsParams:
    """The form that a text has: one of json, regex, choice, grammar and json_object.

    They mean what they mean in nanoinfer.SamplingParams, which checks them, and refuses what our grammars cannot do.
    """

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None


@dataclass
class GuidedDecodingParams(StructuredOutputsParams):
    """StructuredOutputsParams by the name of vLLM before 0.11."""

    backend: str | None = None

    @classmethod
    def from_optional(cls, **entries: Any) -> GuidedDecodingParams | None:
        """Return these entries as an object; None if all are None."""
        return cls(**entries) if any(entry is not None for entry in entries.values()) else None


def with_strict_schema(form: Any) -> Any:
    """Return structured outputs whose JSON Schema forbids what it does not declare, as xgrammar's strict mode does."""
    given = form.get("json") if isinstance(form, Mapping) else getattr(form, "json", None)
    if given is None:
        return form
    schema = given.model_json_schema() if hasattr(given, "model_json_schema") else given
    try:
        strict = _strict(json.loads(schema) if isinstance(schema, str) else schema)
    except ValueError:  # no JSON; SamplingParams says so
        return form
    if isinstance(form, Mapping):
        return {**form, "json": strict}
    return replace(form, json=strict) if isinstance(form, StructuredOutputsParams) else form


NAMED = ("properties", "patternProperties", "$defs", "definitions")  # hold schemas by names
KEPT = ("const", "enum", "default", "allOf")  # are values, or schemas that all hold for one object
OPEN = {"additionalProperties", "unevaluatedProperties", "patternProperties", "allOf"}  # say what else there may be


def _strict(schema: Any) -> Any:
    if isinstance(schema, list):
        return list(map(_strict, schema))
    if not isinstance(schema, Mapping):
        return schema
    inner = {}
    for word, value in schema.items():
        if word in NAMED and isinstance(value, Mapping):
            inner[word] = {name: _strict(one) for name, one in value.items()}
        else:
            inner[word] = value if word in KEPT else _strict(value)
    is_closed = isinstance(schema.get("properties"), Mapping) and not OPEN & schema.keys()
    return {**inner, "additionalProperties": False} if is_closed else inner


def _check_kind(given: Any) -> RequestOutputKind:
    kind = RequestOutputKind.CUMULATIVE if given is None else given
    if not isinstance(kind, RequestOutputKind):
        raise ValueError(f"output_kind={short(given)}: must be one of vllm.sampling_params.RequestOutputKind")
    return kind


class SamplingParams(sampling_params.SamplingParams):
    """nanoinfer's SamplingParams, but max_tokens is 16 if it is left out.

    n, max_tokens, settings: as in nanoinfer.SamplingParams
    guided_decoding: structured_outputs by the name of vLLM before 0.11
    output_kind: what an engine's outputs hold while a request runs: all so far, what is new, or nothing before its end
    """

    output_kind: RequestOutputKind
    __struct_fields__ = tuple(field.name for field in fields(sampling_params.SamplingParams))  # as programs ask

    def __init__(
        self,
        n: int = 1,
        *,
        max_tokens: int | None = MAX_TOKENS,
        guided_decoding: StructuredOutputsParams | Mapping[str, Any] | None = None,
        output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE,
        **settings: Any,
    ) -> None:
        kind = _check_kind(output_kind)
        if guided_decoding is not None:
            if settings.get("structured_outputs") is not None:
                raise ValueError(
                    f"guided_decoding={short(guided_decoding)}: must be None beside structured_outputs, its newer name"
                )
            settings["structured_outputs"] = guided_decoding
        if (form := settings.get("structured_outputs")) is not None:
            settings["structured_outputs"] = with_strict_schema(form)
        super().__init__(n=n, max_tokens=max_tokens, **settings)
        self.__dict__["output_kind"] = kind

    def __setattr__(self, name: str, value: Any) -> None:
        settings = self.__dict__
        if name == "output_kind":
            settings[name] = _check_kind(value)
            return
        kind = settings.get("output_kind")  # the constructor sets it last
        super().__setattr__("structured_outputs" if name == "guided_decoding" else name, value)
        if kind is not None:
            settings["output_kind"] = kind


SamplingParams.__annotations__ = dict(sampling_params.SamplingParams.__annotations__)  # programs look there
