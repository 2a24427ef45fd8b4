"""Encoder: a tokenizer that makes tokens of one text, or of many at once by all cores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IDS_ALONE = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}


class Encoder:
    """Makes tokens of texts in one way. Raises what the tokenizer does, for a text that it does not take.

    how: arguments of the tokenizer, such as add_special_tokens
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, **how: Any) -> None:
        self._tokenizer, self._how = tokenizer, how
        self._known: dict[str, list[int]] = {}  # tokens of texts that were encoded together

    def encode(self, text: str, *second: str) -> list[int]:
        """Return the tokens of a text, or of a pair."""
        if not second and (known := self._known.get(text)) is not None:
            return known.copy()
        return self._tokenizer.encode(text, *second, **self._how)

    @contextmanager
    def at_once(self, texts: list[str]) -> Iterator[None]:
        """Encode texts together before the block, in which `encode` knows them.

        Where one of them cannot be encoded, the block encodes each by itself, and finds it.
        """
        if self._tokenizer.is_fast and len(texts) > 1:
            try:
                self._known = dict(
                    zip(texts, self._tokenizer(texts, **self._how, **IDS_ALONE)["input_ids"], strict=True)
                )
            except Exception:
                self._known = {}
        try:
            yield
        finally:
            self._known = {}
