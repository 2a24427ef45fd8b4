"""Read: what a step reads of a text that it does not continue; PackedTexts: several such texts."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Literal, NamedTuple

What = Literal["first", "last", "mean", "max", "weighted", "labels", "tokens"]
LabelsOf = Literal["first", "last", "mean"]  # what a classifier's head reads


class Read(NamedTuple):
    """What a step reads of a text, behind the last norm.

    what: "first", "last": that token's hidden state; "mean": its tokens' hidden states, which are added up; "weighted":
        the same, each times its place, from 1; "max": the largest of each number; "labels": what a classifier's head
        makes of the text, see LabelsOf; "tokens": the logits of some tokens behind the last one
    tokens: those of "tokens"
    separator: the text is a pair, whose first text ends with this token; None: it is no pair, or nobody asks
    """

    what: What
    tokens: tuple[int, ...] = ()
    separator: int | None = None

    @property
    def needs_all(self) -> bool:
        """Whether tokens before the last count, so that none may come from the cache."""
        return self.what in ("first", "mean", "max", "weighted")

    def divisor(self, tokens: int) -> float:
        """Return what the numbers that steps have added up of a text of so many tokens are to be divided by."""
        return {"mean": tokens, "weighted": tokens * (tokens + 1) / 2}.get(self.what, 1)


@dataclass(frozen=True, slots=True)
class PackedTexts:
    """Texts that are computed as one sequence, and see nothing of each other.

    token_ids: of one text after another; lens: how many tokens each has
    """

    token_ids: array[int]
    lens: list[int]

    def __len__(self) -> int:
        return len(self.token_ids)
