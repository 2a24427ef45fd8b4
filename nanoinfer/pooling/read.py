"""Read: what a step reads of a text that it does not continue."""

from __future__ import annotations

from typing import Literal, NamedTuple

What = Literal["last", "mean", "labels", "tokens"]


class Read(NamedTuple):
    """What a step reads of a text, behind the last norm.

    what: "last": its last token's hidden state; "mean": its tokens' hidden states, which are added up; "labels": what
        a classifier's head makes of the last token; "tokens": the logits of some tokens behind the last one
    tokens: those of "tokens"
    """

    what: What
    tokens: tuple[int, ...] = ()

    @property
    def needs_all(self) -> bool:
        """Whether each token counts, so that none may come from the cache."""
        return self.what == "mean"
