"""Spelling: what tokens stand for behind other text, as text and as bytes."""

from __future__ import annotations

import codecs
import string
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"  # a decoder writes this for bytes that are no character
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # byte-level tokens write these bytes so
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]  # and these as the characters from 256 on
BYTE_OF = {chr(byte): byte for byte in PRINTABLE} | {chr(256 + index): byte for index, byte in enumerate(OTHERS)}

_anchors: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[list[int], int]] = WeakKeyDictionary()


def whole_decoder(tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool) -> Callable[[list[int]], str]:
    """Return the tokenizer's function from all tokens of a text to it, without its clean_up_tokenization_spaces."""
    if tokenizer.is_fast:
        return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=skip_special_tokens)
    return partial(tokenizer.decode, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)


class TokenDecoder:
    """Makes of tokens the text that they add to a text before them, and of a token its bytes.

    Many tokenizers drop the space at the beginning of a whole text. These tokens do not begin one: the space stays.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool) -> None:
        """skip_special_tokens: a special token adds nothing"""
        self._tokenizer, self._decode = tokenizer, whole_decoder(tokenizer, skip_special_tokens)
        self._before, self._length = _anchor(tokenizer)

    def __call__(self, token_ids: list[int]) -> str:
        """Return the text of tokens."""
        return self._decode(self._before + token_ids)[self._length :]

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text in UTF-8, which may be a part of a character alone."""
        text = self([token_id])
        if REPLACEMENT not in text:
            return text.encode()
        spelled = str(self._tokenizer.convert_ids_to_tokens(token_id))
        if is_byte(spelled):
            return bytes([int(spelled[3:5], 16)])
        if all(char in BYTE_OF for char in spelled):
            return bytes(BYTE_OF[char] for char in spelled)
        return text.encode()  # the character itself


def _anchor(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], int]:
    """Return a token that stands for the text before, and the length of its own text; none if no token can."""
    if tokenizer not in _anchors:
        decode = whole_decoder(tokenizer, skip_special_tokens=True)
        ids = ((tokenizer.convert_tokens_to_ids(letter), letter) for letter in string.ascii_letters + string.digits)
        found = ([token_id] for token_id, letter in ids if token_id is not None and decode([token_id]) == letter)
        anchor = next(found, [])
        _anchors[tokenizer] = anchor, len(anchor)
    return _anchors[tokenizer]


def text_offsets(tokenizer: PreTrainedTokenizerBase, token_ids: list[int], skip_special_tokens: bool) -> list[int]:
    """Return for each token of a text the place of the first character that has bytes of it.

    A decoder with byte fallback reads a run of byte tokens as one: if one is wrong, each is a replacement character.
    """
    pieces = list(map(TokenDecoder(tokenizer, skip_special_tokens).bytes_of, token_ids))
    spelled = [str(token) for token in tokenizer.convert_ids_to_tokens(token_ids)]
    shown = [index for index, piece in enumerate(pieces) if piece]  # special tokens may be left out
    for are_bytes, indices in groupby(shown, lambda index: len(pieces[index]) == 1 and is_byte(spelled[index])):
        run = list(indices)
        if are_bytes and REPLACEMENT in b"".join(pieces[index] for index in run).decode(errors="replace"):
            for index in run:
                pieces[index] = REPLACEMENT.encode()
    return list(_places(pieces))


def _places(pieces: list[bytes]) -> Iterator[int]:
    """Yield for each piece of a text's bytes the place of the character to which its first byte belongs."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    length = 0  # of the characters that have ended
    for piece in pieces:
        length += len(decoder.decode(piece[:1]))
        unfinished, _ = decoder.getstate()
        yield length if unfinished or not piece else length - 1
        length += len(decoder.decode(piece[1:]))


def is_byte(spelled: str) -> bool:
    """Whether a token is one byte, such as <0xE2>, which a decoder with byte fallback joins with its neighbours."""
    return len(spelled) == 6 and spelled.startswith("<0x") and spelled.endswith(">")
