"""Grammar tokens: which tokens spell the texts of grammars, and which a grammar can only name."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from tokenizers import Tokenizer

Spell = Callable[[int], bytes]

NAMED = b"\xff"  # stands before a named token's name
NO_TOKEN = 2**32 - 1

# llguidance knows beforehand which tokens these match whole. With six lengths of pieces of a JSON string, the masks in
# strings of bounded length take two thirds of the time that they take with llguidance's own two.
PIECE = r'[^"\\\x00-\x1F\x7F]'
SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{PIECE}{{1,{most}}}" for most in (1, 2, 4, 8, 14, 30)), f"{PIECE}+"]


class GrammarTokens:
    """A tokenizer as llguidance reads one, which looks for attributes of these names.

    Where only one text may follow, llguidance takes the tokens that the tokenizer makes of it. To llguidance, a token
    is either text or named, and a text of a named token would leave none. Tokens that an output does not show, and ends
    of sequence, are named: other tokens spell their text. Added tokens that are shown, such as <tool_call> of Qwen, are
    text: models have learned to write it with them. In a grammar that names tokens, they are named, too.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self, tokenizer: Tokenizer, num_tokens: int, eos_token_ids: Collection[int], spell: Spell, names_all: bool
    ) -> None:
        """num_tokens: the number of tokens; eos_token_ids: those that may end a text, perhaps none

        spell: returns the bytes that an output shows of a token; names_all: every added token is named

        Raises ValueError for a tokenizer whose tokens are not made of bytes.
        """
        added = {token_id: token.content.encode() for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        shown = {token_id: spell(token_id) for token_id in added}
        named = {token_id for token_id in added if names_all or not shown[token_id]}.union(eos_token_ids)
        spelling = [token_id for token_id in added if token_id not in named and shown[token_id] == added[token_id]]
        without_named = _read(_written(tokenizer, spelling), num_tokens)
        self.eos_token_id = min(eos_token_ids, default=NO_TOKEN)
        self.special_token_ids = sorted(named)
        # llguidance takes the token of that byte for a named one.
        is_named, bytes_of = without_named.is_special_token, without_named.decode_bytes
        self.tokens = [NAMED if is_named(token_id) else bytes_of([token_id]) for token_id in range(num_tokens)]
        for token_id, content in added.items():
            self.tokens[token_id] = content if token_id in named else shown[token_id]
        self._tokenize = without_named.tokenize_str

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text that stands behind others."""
        return self._tokenize(text)


def _read(written: str, num_tokens: int) -> LLTokenizer:
    from llguidance import LLTokenizer

    try:
        return LLTokenizer(written, n_vocab=num_tokens, slices=[])
    except ValueError as error:
        raise ValueError(
            "needs a tokenizer whose decoder is ByteLevel or has ByteFallback, so that its tokens are made of bytes"
        ) from error


def _written(tokenizer: Tokenizer, added: Collection[int]) -> str:
    """Return a tokenizer's tokenizer.json, with these added tokens alone."""
    written = {name: _state(getattr(tokenizer, name)) for name in ("normalizer", "pre_tokenizer", "decoder")}
    tokens = tokenizer.get_added_tokens_decoder()
    written["added_tokens"] = [{"id": token_id, **tokens[token_id].__getstate__()} for token_id in added]
    written["decoder"] = _readable(written["decoder"])
    model = tokenizer.model.__getstate__().decode()  # large: it stays text
    return f'{json.dumps({"version": "1.0", **written})[:-1]}, "model": {model}}}'


def _state(part: Any) -> Any:
    """Return a part of a tokenizer as tokenizer.json has it; None: the tokenizer has none."""
    return None if part is None else json.loads(part.__getstate__())


def _readable(decoder: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a decoder that llguidance knows: it takes Metaspace's spaces for a letter."""
    for step in (decoder or {}).get("decoders", [decoder or {}]):
        if step.get("type") == "Metaspace":
            spaces = {"type": "Replace", "pattern": {"String": step["replacement"]}, "content": " "}
            return {"type": "Sequence", "decoders": [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]}
    return decoder
