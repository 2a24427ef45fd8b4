"""Structured outputs: checks the form that a request wants its text to have, as far as no tokenizer is needed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from nanoinfer.checks import as_list, short

ANY_OBJECT = '{"type": "object"}'
REASONING = "reasoning"  # beside a kind: whether the form binds what stands behind a thought alone
GUIDANCE = ("auto", "guidance")  # the names that vLLM has for llguidance, or for any


def check_structured_outputs(value: Any) -> dict[str, Any] | None:
    """Return {kind: its value}, of Python's own types: a schema as JSON text, choices as a tuple; None stays None.

    An entry REASONING that is not None stays beside it.

    value: a mapping, or an object with such attributes, as vLLM's; an entry that is None counts as missing
    """
    if value is None:
        return None
    name = f"structured_outputs={short(value)}"
    entries = _entries(value)
    for option, (is_known, instead) in OPTIONS.items():
        if (wanted := entries.get(option)) is not None and not is_known(wanted):
            raise ValueError(f"{name}: {option}={short(wanted)}: {instead}")
    kinds = [kind for kind in KINDS if entries.get(kind) is not None] or [kind for kind in KINDS if kind in entries]
    if len(kinds) != 1 or entries.keys() - KINDS.keys() - OPTIONS.keys():
        raise ValueError(f"{name}: must be a mapping with one of {', '.join(map(repr, KINDS))}")
    (kind,) = kinds
    convert, what = KINDS[kind]
    try:
        converted = convert(entries[kind])
    except Exception as error:  # a class's own model_json_schema may raise anything
        raise ValueError(f"{name}: {kind!r} must be {what}: {error}") from error
    if not converted:
        raise ValueError(f"{name}: {kind!r} must be {what}")
    space = "" if entries.get("disable_any_whitespace") else None
    space = entries.get("whitespace_pattern", space)
    form = {kind: converted} if space is None else _with_space(kind, converted, space)
    return form if entries.get(REASONING) is None else {**form, REASONING: entries[REASONING]}


def _entries(value: Any) -> dict[Any, Any]:
    """Return what a mapping or an object names, without private names, and without options that are None."""
    if isinstance(value, Mapping):
        return {
            name: entry
            for name, entry in value.items()
            if not (isinstance(name, str) and name.startswith("_")) and (entry is not None or name in KINDS)
        }
    names = [*KINDS, *OPTIONS]
    return {name: entry for name in names if (entry := getattr(value, name, None)) is not None}


def _with_space(kind: str, wanted: Any, pattern: str) -> dict[str, Any]:
    """Return a form whose JSON, if it is any, has white space that matches a regular expression between its tokens."""
    if kind not in ("json", "json_object"):
        return {kind: wanted}
    schema = json.loads(wanted if kind == "json" else ANY_OBJECT)
    own = schema.get("x-guidance")  # llguidance's own options
    options = {**(own if isinstance(own, dict) else {}), "whitespace_pattern": pattern}
    return {"json": json.dumps({**schema, "x-guidance": options})}


def _as_schema(value: Any) -> str | None:
    """Return a JSON Schema as text; its entries keep their order, which is that of the output's."""
    if hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    schema = json.loads(value) if isinstance(value, str) else value
    if not isinstance(schema, Mapping):
        return None
    _check_unicode(json.dumps(dict(schema), ensure_ascii=False))
    return json.dumps(dict(schema), allow_nan=False)


def _as_any_object(value: Any) -> bool:
    return value is True


def _as_text(value: Any) -> str | None:
    return _check_unicode(str.__str__(value)) if isinstance(value, str) else None


def _check_unicode(text: str) -> str:
    """Return a text that UTF-8 can write. Raises ValueError for one that has half a surrogate pair."""
    if (half := next((char for char in text if "\ud800" <= char <= "\udfff"), None)) is not None:
        raise ValueError(f"it has {half!r}, half a surrogate pair, which stands for no character: leave it out")
    return text


def _as_choices(value: Any) -> tuple[str, ...] | None:
    choices = as_list(value, ordered=False) or []
    if not all(isinstance(choice, str) and choice for choice in choices):
        return None
    return tuple(_check_unicode(str.__str__(choice)) for choice in choices)


KINDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "json": (_as_schema, "a JSON Schema: a mapping, a JSON text, or a class with model_json_schema"),
    "json_object": (_as_any_object, "True"),
    "regex": (_as_text, "a non-empty string"),
    "choice": (_as_choices, "a list of non-empty strings"),
    "grammar": (_as_text, "a grammar's text, in Lark or GBNF"),
}
"""The kinds of structured outputs: how to convert a value, and what it must be."""


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


OPTIONS: dict[str, tuple[Callable[[Any], bool], str]] = {
    REASONING: (_is_flag, "must be None, True or False"),
    "disable_any_whitespace": (_is_flag, "must be True or False"),
    "whitespace_pattern": (lambda value: isinstance(value, str), "must be a regular expression"),
    "disable_additional_properties": (lambda value: value is False, "write additionalProperties into the schema"),
    "structural_tag": (lambda value: False, "there are no structural tags: write a grammar"),
    "backend": (
        lambda value: isinstance(value, str) and value in GUIDANCE,
        "leave it out: llguidance compiles every form",
    ),
    "backend_was_auto": (_is_flag, "must be True or False"),
    "disable_fallback": (_is_flag, "must be True or False"),
}
"""What may stand beside a kind, most of it in vLLM's objects: whether a value can be had, and what to do if not."""
