"""Grammar errors: what llguidance finds wrong with a form, in words that say what would work."""

from __future__ import annotations

import re

TYPES = '"string", "number", "integer", "boolean", "null", "array" or "object"'
IGNORE = 'leave it out, or write "x-guidance": {"lenient": true} at the root of the schema, which ignores such entries'
ANY_OF = (
    'a value may fit several schemas of "oneOf", which no grammar can forbid: write "anyOf", or "x-guidance":'
    ' {"coerce_one_of": true} at the root of the schema, which reads "oneOf" as "anyOf"'
)
NO_LARK = (
    "must be Lark here: texts stand in double quotes, with JSON's escapes, and regular expressions between slashes"
)
NEITHER = (
    "must be Lark, of which a line begins with start: or %llguidance, or GBNF, whose rules are written root ::= ...; as"
    " GBNF it is wrong in"
)
COMPLEX = "the grammar grew too complex to follow: write it so that fewer of its rules fit one text"

# How a message of llguidance looks, and what it says; \1 and so on are its groups.
OF_SCHEMAS = {
    r"oneOf constraints are not supported.*": ANY_OF,
    r"Unimplemented keys: \[(.*)\]": rf"no grammar can follow \1: {IGNORE}",
    r"Unknown format: (.*)": rf'"format": "\1" is not known: write a "pattern", {IGNORE}',
    r"Invalid type: (.*)": rf'"type": "\1" must be {TYPES}',
    r"type must be a string.*": rf'"type" must be {TYPES}, or an array of these',
    r"Unsatisfiable schema: Regex is empty.*": "no string fits both its format and its patterns: let one go",
    r"Unsatisfiable schema: anyOf is empty": 'must allow a value: "enum", "anyOf", "oneOf" or "type" is empty',
    r"Unsatisfiable schema: (.*)": r"must allow a value, and allows none: \1",
    r"Pointer '(.*)' does not exist": r'"$ref": "#\1" must be a place in the schema',
    r"Resource '(?:json-schema:///)?(.*?)' is not present.*": (
        r'"\1" is not in the schema, and nothing is fetched: write it into "$defs", and "$ref": "#/$defs/..."'
    ),
    r"Expected positive integer for '(.*?)', got (.*)": r'"\1": \2 must be a whole number from 0',
    r"Expected f64 for '(.*?)', got (.*)": r'"\1": \2 must be a number',
    r"Expected (\w+) for '(.*?)' item, got (.*)": r'"\2" has \3: must be an array of \1s',
    r"Expected (\w+) for '(.*?)', got (.*)": r'"\2": \3 must be of the type \1',
    r"(\S+) must be (an? \w+), got (.*)": r'"\1": \3 must be \2',
    r"(\S+) must be (an? \w+)": r'"\1" must be \2',
    r"schema must be an object or boolean": "each schema in it must be an object, true or false",
    r"invalid multiple of": '"multipleOf" must be above 0',
    r"EOF while parsing an? (.*)": r"must be JSON, whose \1 has an end",
    r"unknown field `(.*?)`, expected one of (.*)": r'"\1" must be one of \2',
    r"invalid type: .*?`(.*?)`, expected (.*)": r'"x-guidance" has \1: must be \2',
}
OF_EXPRESSIONS = {
    r".*look-?around.*": r"there are no look-arounds, such as (?=a), (?<!a), \\b and a ^ or $ within: write it without",
    r"backreferences are not supported": r"there are no backreferences, such as \\1: write the group again",
}
OF_LARK = {
    r'unknown name: "(.*)"': r'"\1" must be a rule: define it; a rule in capitals can use only rules in capitals',
    r'unknown special token: "(.*?)";.*': r'the tokenizer has no token \1: write "\1" in double quotes for its text',
    r"Token range end too large: (.*)": r"there is no token \1: must be below the number of the model's tokens",
    r"invalid digit found in string": "must have the ids of tokens between <[ and ]>",
    r"lexer error": NO_LARK,
    r"Expected token '(.*?)', found '\\n'.*": r"must have \1 before the line ends",
    r"Expected token '(.*?)', found '(.*?)'.*": r"must have \1, and has \2",
    r"Expected value.*": "must have a text, an expression or the name of a rule",
    r'duplicate rule: "(.*)"': r'"\1" must be defined once',
    r'circular reference in token "(.*)" definition': (
        r'"\1" must not use itself: a rule in capitals is a regular expression, and one in small letters may'
    ),
    r"& is only supported for tokens.*": "& must stand in a rule in capitals",
    r"range end must be >= start.*": "must count from the smaller number to the larger one",
    r"Unknown common regex: (.*?); .*?: (.*)": r'"\1" must be one of \2',
    r"no start rule found": "must have a rule named start",
    r"unknown grammar (@\S+)": r"\1 must be a rule: there are no other grammars beside this one",
    r"Rule '(.*)' not found": r'"\1" must be a rule: define it',
    r"Rule '(.*)' already exists": r'"\1" must be defined once',
    r"No 'root' rule found": "must have a rule named root",
    r"(.*) at line (\d+), '(.*)' \^ '.*'": rf"{NEITHER} line \2, behind '\3': \1",
}
OF_TEXTS = {
    r".*NoExtension.*": "no token can begin or go on with the text: let the form allow one",
    r".*(?:Too many items|too complex|TooComplex|fuel|limit|too (?:big|large|many)).*": COMPLEX,
}
WORDS = [
    (re.compile(pattern), meaning)
    for table in (OF_SCHEMAS, OF_EXPRESSIONS, OF_LARK, OF_TEXTS)
    for pattern, meaning in table.items()
]
PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
BEFORE = re.compile(r"failed to (?:compile JSON schema|parse \S+): |invalid regex .*? \(in regex\): ")
EXPRESSION = re.compile(r"regex parse error:\n(?: {4}(.*)\n {4} *\^+ *\n)?.*?error: ([^\n]*)", re.DOTALL)
EXCERPT = re.compile(r"\n +\d+ \| .*| at line \d+ column \d+$", re.DOTALL)  # behind what is wrong


def explain(message: str, has_lines: bool = False) -> str:
    """Return what is wrong by a message of llguidance, and what would work.

    has_lines: the message is of a grammar that the user wrote in Lark, whose lines it counts
    """
    message = EXCERPT.sub("", message).strip()
    place = PLACE.match(message)
    rest = message[place.end() :] if place else message
    rest = BEFORE.sub("", rest)
    where = f"line {place[1]}, column {place[2]}: " if place and has_lines else ""
    if expression := EXPRESSION.search(rest):
        where += f'"{expression[1]}" is no regular expression of Rust\'s syntax: ' if expression[1] else ""
        rest = expression[2]
    for pattern, meaning in WORDS:
        if found := pattern.fullmatch(rest):
            return where + found.expand(meaning).replace("`", "")
    return f"{where}{rest}" if expression else f"{where}llguidance cannot read it: {rest}"
