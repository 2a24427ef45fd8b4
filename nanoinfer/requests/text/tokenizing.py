"""LLM.tokenize and LLM.detokenize: what becomes of texts and tokens by the tokenizer alone."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from typing import overload

from nanoinfer.hints import hints_for
from nanoinfer.requests.inputs import Inputs


class TokenizesTexts:
    """A base of LLM: what it makes of texts and tokens without its model."""

    _inputs: Inputs

    @overload
    def tokenize(self, texts: str) -> list[int]: ...

    @overload
    def tokenize(self, texts: list[str]) -> list[list[int]]: ...

    @hints_for("tokenize")
    def tokenize(self, texts: str | ListLike[str]) -> list[int] | list[list[int]]:
        """Return the tokens that generate makes of a text as a prompt, or of each text in a list.

        texts: a string, or a list of strings

        Raises ValueError for what is no text, and without a tokenizer.
        """
        return self._inputs.tokenize(texts)

    @overload
    def detokenize(self, ids: ListLike[int]) -> str: ...

    @overload
    def detokenize(self, ids: ListLike[ListLike[int]]) -> list[str]: ...

    @hints_for("detokenize")
    def detokenize(self, ids: ListLike[int] | ListLike[ListLike[int]]) -> str | list[str]:
        """Return the whole text of a list of tokens, or of each list in a list, without special tokens.

        ids: a list of token ids, or a list of such lists; where `tokenize` has added a first space, it is dropped

        Raises ValueError for what is no token of the model's, and without a tokenizer.
        """
        return self._inputs.detokenize(ids)
