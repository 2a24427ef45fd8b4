"""What is wrong with a form is told in words that name its place and what would work, not in llguidance's."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="structured outputs need the llguidance package")

from transformers import AutoTokenizer

from nanoinfer import BUNDLED_MODEL, SamplingParams
from nanoinfer.grammar.errors import explain
from nanoinfer.grammar.grammar import Grammars
from nanoinfer.requests.text.spelling import TokenDecoder

MIXED = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
THEIRS = [
    "llguidance cannot",
    "Enable",
    "Unimplemented",
    "Unsatisfiable",
    "f64",
    "lexer",
    "parse error",
    "NoExt",
    "retriev",
]


@cache
def grammars() -> Grammars:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    return Grammars(tokenizer, 2048, [2], TokenDecoder(tokenizer, skip_special_tokens=True).bytes_of)


def compiled(form: dict[str, Any]) -> None:
    grammars().compile(SamplingParams(structured_outputs=form).structured_outputs)


SCHEMAS = [
    (MIXED, 'write "anyOf", or "x-guidance": {"coerce_one_of": true} at the root of the schema'),
    ({"if": {"type": "string"}, "then": {"minLength": 2}}, 'no grammar can follow "if", "then": leave it out'),
    ({"type": "array", "uniqueItems": True}, '"uniqueItems": leave it out, or write "x-guidance": {"lenient": true}'),
    ({"type": 5}, '"type" must be "string", '),
    ({"type": "strin"}, '"type": "strin" must be "string", '),
    ({"type": []}, '"type" is empty'),
    ({"enum": []}, 'must allow a value: "enum", "anyOf", "oneOf" or "type" is empty'),
    ({"enum": 5}, '"enum" must be an array'),
    ({"const": 1, "type": "string"}, "must allow a value, and allows none: incompatible types"),
    ({"type": "integer", "minimum": 5, "maximum": 2}, "allows none: minimum (5) is greater than maximum (2)"),
    ({"type": "string", "format": "date", "pattern": "a"}, "no string fits both its format and its patterns"),
    ({"type": "string", "format": "color"}, '"format": "color" is not known: write a "pattern", leave it out'),
    ({"type": "string", "minLength": -1}, '"minLength": -1 must be a whole number from 0'),
    ({"type": "integer", "minimum": "a"}, '"minimum": "a" must be a number'),
    ({"type": "number", "multipleOf": 0}, '"multipleOf" must be above 0'),
    ({"required": 5}, '"required": 5 must be of the type array'),
    ({"required": [5]}, '"required" has 5: must be an array of strings'),
    ({"$ref": 5}, '"$ref": 5 must be a string'),
    ({"$ref": "http://example.com/x"}, '"http://example.com/x" is not in the schema, and nothing is fetched: write it'),
    ({"items": 5}, "each schema in it must be an object, true or false"),
    ({"type": "string", "pattern": "(a"}, '"(a" is no regular expression of Rust\'s syntax: unclosed group'),
    (
        {"type": "string", "pattern": r"\bfoo"},
        "there are no look-arounds, such as (?=a), (?<!a), \\b and a ^ or $ within: write",
    ),
    ({"x-guidance": {"nope": 1}}, '"nope" must be one of item_separator, key_separator, '),
    ({"x-guidance": {"whitespace_pattern": 5}}, '"x-guidance" has 5: must be a string'),
]
OTHERS = [
    ({"regex": r"(a)\1"}, "'regex': \"(a)\\1\" is no regular expression", "there are no backreferences, such as \\1"),
    ({"regex": "a{5,2}"}, "'regex': \"a{5,2}\" is no regular", "the start must be <= the end"),
    ({"grammar": "hello"}, "'grammar': must be Lark, ", "or GBNF, whose rules are written root ::= ...", "line 1"),
    ({"grammar": 'x ::= "a"'}, "'grammar': must have a rule named root"),
    ({"grammar": '%llguidance {}\nroot: "a"'}, "must have a rule named start"),
    ({"grammar": 'start: A\nA: b\nb: "c"'}, 'line 2, column 4: "b" must be a rule', "only rules in capitals"),
    ({"grammar": 'start: "a"\nstart: "b"'}, 'line 2, column 8: "start" must be defined once'),
    ({"grammar": "start: A\nA: B\nB: A"}, 'line 3, column 4: "A" must not use itself'),
    ({"grammar": "start: 'a'"}, "line 1, column 8: must be Lark here: texts stand in double quotes"),
    ({"grammar": 'start: (("a")'}, "line 1, column 14: must have ) before the line ends"),
    ({"grammar": "start: <nowhere>"}, 'has no token <nowhere>: write "<nowhere>" in double quotes for its text'),
    ({"grammar": "start: <[99999]>"}, "there is no token 99999: must be below the number of the model's tokens"),
    ({"grammar": "start: /(a/"}, 'line 1, column 8: "(a" is no regular expression of Rust\'s syntax: unclosed group'),
    ({"grammar": '%import nope\nstart: "a"'}, 'line 1, column 1: "nope" must be one of common.DIGIT'),
    ({"grammar": f"start: %json {json.dumps(MIXED)}"}, 'line 1, column 8: a value may fit several schemas of "oneOf"'),
    ({"grammar": "start: %json {"}, "must be JSON, whose object has an end"),
    ({"grammar": 'start: start "a"'}, "no token can begin or go on with the text: let the form allow one"),
]
CASES = [({"json": schema}, "'json': ", words) for schema, words in SCHEMAS] + OTHERS


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_refused_form_is_told_what_would_work(case: tuple[Any, ...]) -> None:
    form, *words = case
    with pytest.raises(ValueError) as raised:
        compiled(form)
    assert [word for word in words if word not in str(raised.value)] == [], str(raised.value)
    assert [word for word in THEIRS if word in str(raised.value)] == []


@pytest.mark.parametrize(
    "schema",
    [
        {**MIXED, "x-guidance": {"coerce_one_of": True}},
        {"properties": {"a": MIXED}, "x-guidance": {"coerce_one_of": True}},
        {"anyOf": MIXED["oneOf"]},
        {"properties": {"a": {"not": {}}}, "x-guidance": {"lenient": True}},
        {"type": "string", "format": "color", "x-guidance": {"lenient": True}},
    ],
    ids=str,
)
def test_what_would_work_does(schema: dict[str, Any]) -> None:
    compiled({"json": schema})


def test_a_grammar_that_grew_too_complex_is_told_so_whatever_has_grown() -> None:
    for message in ("parser error: Too many items (limit 20)", "lexer error: too many states", "ParserTooComplex"):
        assert explain(message).startswith("the grammar grew too complex to follow: write it so")


def test_what_is_not_known_is_quoted() -> None:
    assert explain("at 3(4): never heard of\n   1 | start:\n", True) == (
        "line 3, column 4: llguidance cannot read it: never heard of"
    )
