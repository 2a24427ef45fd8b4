"""Structured outputs: checks the form that a request wants its text to have, as far as no tokenizer is needed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from nanoinfer.checks import as_list, short

ANY_OBJECT = '{"type": "object"}'


def check_structured_outputs(value: Any) -> dict[str, Any] | None:
    """Return {kind: its value}, of Python's own types: a schema as JSON text, choices as a tuple; None stays None."""
    if value is None:
        return None
    name = f"structured_outputs={short(value)}"
    if not isinstance(value, Mapping) or len(value) != 1 or next(iter(value)) not in KINDS:
        raise ValueError(f"{name}: must be a mapping with one of {', '.join(map(repr, KINDS))}")
    ((kind, wanted),) = value.items()
    convert, what = KINDS[kind]
    try:
        converted = convert(wanted)
    except Exception as error:  # a class's own model_json_schema may raise anything
        raise ValueError(f"{name}: {kind!r} must be {what}: {error}") from error
    if not converted:
        raise ValueError(f"{name}: {kind!r} must be {what}")
    return {kind: converted}


def _as_schema(value: Any) -> str | None:
    """Return a JSON Schema as text; its entries keep their order, which is that of the output's."""
    if hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    schema = json.loads(value) if isinstance(value, str) else value
    return json.dumps(dict(schema), allow_nan=False) if isinstance(schema, Mapping) else None


def _as_any_object(value: Any) -> bool:
    return value is True


def _as_text(value: Any) -> str | None:
    return str.__str__(value) if isinstance(value, str) else None


def _as_choices(value: Any) -> tuple[str, ...] | None:
    choices = as_list(value, ordered=False) or []
    return tuple(map(str.__str__, choices)) if all(isinstance(choice, str) and choice for choice in choices) else None


KINDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "json": (_as_schema, "a JSON Schema: a mapping, a JSON text, or a class with model_json_schema"),
    "json_object": (_as_any_object, "True"),
    "regex": (_as_text, "a non-empty string"),
    "choice": (_as_choices, "a list of non-empty strings"),
    "grammar": (_as_text, "a grammar's text, in Lark or GBNF"),
}
"""The kinds of structured outputs: how to convert a value, and what it must be."""
