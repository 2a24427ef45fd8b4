"""Errors: the lines of a run that failed, counted by kind."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from nanoinfer.batch.lines.requests import LineError

MOST_KINDS = 20  # that are counted; errors of further kinds count together
MOST_KEPT = 100  # errors whose messages are kept
MOST_CHARACTERS = 80  # of a kind's name
OTHERS = "others"
RULE = ": must "  # begins what a value should have been, in our messages
FIRST = re.compile(r"""^(['"])(?:\\.|(?!\1).)*\1(?=\s)""", re.DOTALL)  # a quoted value before the words
# What differs among errors of a kind: a setting's value, a quoted or bracketed one and all behind it, a number.
VALUE = re.compile(r"(?<=\w=).*|(?<![\w\[])['\"\[{].*|(?<!\w)-?\d[\d,.]*", re.DOTALL)


def kind_of(reason: str) -> str:
    """Return what the reasons of one kind share: the words before the first ": ", with "..." for each value.

    Where they end in a value, the rule that it breaks comes behind them. So "prompt has 9 tokens: must be ..." is of
    the kind "prompt has ... tokens", "n=0: must be at least 1" of "n=...: must be at least ...", and "'a' is unknown"
    of "... is unknown".
    """
    reason = FIRST.sub("...", reason)
    clause = VALUE.sub("...", reason).split(": ")[0]
    _, is_known, rule = reason.rpartition(RULE)
    if clause.endswith("...") and is_known:
        clause += RULE + VALUE.sub("...", rule)
    return " ".join(clause.split())[:MOST_CHARACTERS]


class ErrorKind(NamedTuple):
    """The errors of one kind: its name, their number, and the message of the first."""

    name: str
    num_errors: int
    example: str


class Errors:
    """Counts errors by kind. What it keeps has a limit, whatever a file holds.

    messages: of the first errors
    """

    def __init__(self) -> None:
        self.messages: list[str] = []
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, str] = {}  # by kind

    def __len__(self) -> int:
        return self._counts.total()

    def add(self, error: LineError) -> None:
        """Count an error."""
        kind, message = kind_of(error.reason), str(error)
        if kind not in self._counts and len(self._counts) >= MOST_KINDS:
            kind = OTHERS
        self._counts[kind] += 1
        self._examples.setdefault(kind, message)
        if len(self.messages) < MOST_KEPT:
            self.messages.append(message)

    def kinds(self) -> Iterator[ErrorKind]:
        """Yield all kinds, those with the most errors first."""
        for name, count in self._counts.most_common():
            yield ErrorKind(name, count, self._examples[name])

    def __str__(self) -> str:
        return "errors by kind: " + "; ".join(f"{kind.num_errors:,} {kind.name}" for kind in self.kinds())
