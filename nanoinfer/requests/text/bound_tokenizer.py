"""BoundTokenizer: a tokenizer with the arguments of its calls; it makes tokens of one text, or of many at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IDS_ALONE = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}


class BoundTokenizer:
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
            with suppress(Exception):
                made = self._tokenizer(texts, **self._how, **IDS_ALONE)["input_ids"]
                self._known = dict(zip(texts, made, strict=True))
        try:
            yield
        finally:
            self._known = {}
