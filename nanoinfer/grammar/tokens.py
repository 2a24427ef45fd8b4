"""Grammar tokens: which tokens spell the texts of grammars, and which a grammar can only name."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from tokenizers import Tokenizer

Spell = Callable[[int], bytes]

NOTHING = b""  # never allowed
NO_TOKEN = 2**32 - 1
MOST_KEPT = 4096  # texts, as tokens

# llguidance knows beforehand which tokens these match whole. With six lengths of pieces of a JSON string, the masks in
# strings of bounded length take two thirds of the time that they take with llguidance's own two.
PIECE = r'[^"\\\x00-\x1F\x7F]'
SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{PIECE}{{1,{most}}}" for most in (1, 2, 4, 8, 14, 30)), f"{PIECE}+"]


class GrammarTokens:
    """A tokenizer as llguidance's TokenizerWrapper takes one, with attributes of these names.

    Where only one text may follow, llguidance takes the tokens that the tokenizer makes of it. To llguidance, a token
    is a text or has a name. Where the tokenizer makes a token with a name of a text, none is left. So there are two
    readings:
    - For forms that name no token, an added token is the text that an output shows of it. Models have learned to write
      <tool_call> with one where they know it. What an output does not show, and what ends it, is no text: the letters
      of <|im_end|> are spelled by other tokens.
    - For a grammar that names tokens, each added token has its name, and other tokens spell every text. But those of
      which the tokenizer's merges make a text anyhow, such as Gemma 3's line breaks, are no more than that text.
    """

    bos_token_id = None

    def __init__(
        self, tokenizer: Tokenizer, num_tokens: int, eos_token_ids: frozenset[int], spell: Spell, has_names: bool
    ) -> None:
        """num_tokens: ids from there on are not read; eos_token_ids: those that may end a text, perhaps none

        spell: returns the bytes that an output shows of a token; has_names: added tokens have names, not texts

        Raises ValueError for a tokenizer whose tokens are not made of bytes.
        """
        names = {token_id: token.content.encode() for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        shown = {token_id: spell(token_id) for token_id in names if token_id not in eos_token_ids}
        spelling = [token_id for token_id, text in shown.items() if text == names[token_id] and not has_names]
        ordinary = _read(_written(tokenizer, spelling), num_tokens)
        named = {t for t, name in names.items() if has_names and ordinary.tokenize_bytes(name) != [t]}
        # To llguidance, ids without a token have names, too, and the token of byte 255, with which names begin.
        has_name, bytes_of = ordinary.is_special_token, ordinary.decode_bytes
        self.tokens = [NOTHING if has_name(token_id) else bytes_of([token_id]) for token_id in range(num_tokens)]
        for token_id in names.keys() | eos_token_ids:
            self.tokens[token_id] = names[token_id] if token_id in named else shown.get(token_id, NOTHING)
        self.special_token_ids = sorted(named)
        self.eos_token_id = min(eos_token_ids, default=NO_TOKEN)
        # The threads that make masks wait for Python's lock here, and rows of one form ask for the same texts.
        self._tokenize = lru_cache(MOST_KEPT)(ordinary.tokenize_bytes)

    def __call__(self, text: bytes) -> list[int]:
        """Return the tokens of a text that stands behind others, in UTF-8."""
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
