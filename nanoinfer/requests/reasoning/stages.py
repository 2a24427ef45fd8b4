"""Stages: how a family's markers lead from one part of an output to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

Part = Literal["reasoning", "answer"]
Next = int | Callable[[bytes], int]  # a stage; or what chooses it by the bytes since the stage before began


class Stage(NamedTuple):
    """A stretch of an output between two markers.

    part: to which its text belongs; None: to neither, as that between two markers of a header
    marks: what ends it, and the stage behind that
    """

    part: Part | None
    marks: tuple[tuple[bytes, Next], ...] = ()


class Markers(NamedTuple):
    """The markers of a family.

    opening, closing, leaving: as for Thought, as text
    stages: an output begins in the first
    ends: what a prompt may end with -> the stage in which its output begins
    """

    opening: str
    closing: str
    leaving: str
    stages: tuple[Stage, ...]
    ends: tuple[tuple[bytes, int], ...]


def pair(opening: str, closing: str) -> Markers:
    """Return the markers of a family whose thoughts stand between two of them; an output has one thought at most."""
    first, last = opening.encode(), closing.encode()
    stages = Stage("answer", ((first, 1),)), Stage("reasoning", ((last, 2),)), Stage("answer")
    return Markers(opening, closing, closing, stages, ((first, 1),))


CHANNEL, MESSAGE, START, END = b"<|channel|>", b"<|message|>", b"<|start|>", b"<|end|>"


def _by_channel(name: bytes) -> int:
    return 4 if name.startswith(b"final") else 3


HARMONY = Markers(
    "<|channel|>analysis<|message|>",
    "<|channel|>final<|message|>",
    "<|end|><|start|>assistant<|channel|>final<|message|>",
    (
        Stage("answer", ((CHANNEL, 2), (START, 1))),  # a prompt that is no chat
        Stage(None, ((CHANNEL, 2), (MESSAGE, 3))),  # a message's header
        Stage(None, ((MESSAGE, _by_channel),)),  # the name of its channel
        Stage("reasoning", ((END, 1), (START, 1), (CHANNEL, 2))),
        Stage("answer", ((END, 1), (START, 1), (CHANNEL, 2))),
    ),
    ((b"<|channel|>analysis<|message|>", 3), (b"<|channel|>final<|message|>", 4)),
)
"""gpt-oss's: an output is messages, each in a channel. That of the channel "final" is the answer."""
