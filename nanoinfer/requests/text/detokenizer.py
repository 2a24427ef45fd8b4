"""Detokenizer: makes a sequence's text while its tokens come, and finds the stop string that ends it."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from nanoinfer.engine.sequence import Sequence
from nanoinfer.requests.text.spelling import REPLACEMENT, TokenDecoder, is_byte
from nanoinfer.requests.text.stop_strings import stop_strings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_WINDOW = 8  # tokens: a longer window drops its older half if it can
MAX_STRAYS = 3  # bytes at the window's beginning whose character began in a dropped token


class TokenWindow:
    """The newest tokens. Each new token is decoded with these alone, so that its cost does not grow with the text.

    Text is sure when no later token can change it. Two kinds of text are not sure yet:
    - An unfinished character. A decoder ends the text with one replacement character for its bytes.
    - A run of byte tokens, such as <0xE2>. A decoder with byte fallback reads the whole run as UTF-8. If one byte is
      wrong, it makes a replacement character of every byte. So a run's text is sure when another token follows.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool) -> None:
        self._spell = tokenizer.backend_tokenizer.id_to_token
        self._decode = TokenDecoder(tokenizer, skip_special_tokens)
        self._tokens: list[int] = []
        self._length = 0  # characters in the tokens' text
        self._num_sure = 0  # characters of that text that are sure, from its beginning
        self._num_bytes = 0  # byte tokens at the end

    def push(self, token_id: int) -> tuple[str, bool] | None:
        """Add a token; returns the whole characters behind the sure ones and whether they are sure; None: no news."""
        if is_byte(self._spell(token_id) or ""):  # an id without a token has no spelling
            return self._push_byte(token_id)
        text = self._decode([*self._tokens, token_id])
        if (self._num_bytes or len(text) == self._length) and self._is_silent(token_id):
            return None
        start = self._num_sure
        self._tokens.append(token_id)
        self._num_bytes = 0
        self._measure(text)
        if len(self._tokens) > MAX_WINDOW:
            self._shrink()
        return text[start : len(text) - text.endswith(REPLACEMENT)], True

    def _push_byte(self, token_id: int) -> tuple[str, bool] | None:
        self._tokens.append(token_id)
        self._num_bytes += 1
        if self._num_bytes % (self._num_bytes // 64 + 1):
            return None  # a long run is decoded only now and then, because that decodes all of it
        return self._decode(self._tokens)[self._num_sure :].rstrip(REPLACEMENT), False

    def finish(self) -> str:
        """Return the text behind the sure characters, when no token follows."""
        rest = self._decode(self._tokens)[self._num_sure :]
        self._tokens, self._num_sure = [], 0
        return rest

    def _is_silent(self, token_id: int) -> bool:
        """Whether a token has no text, as a special one."""
        return not self._decode([token_id])

    def _measure(self, text: str) -> None:
        self._length = len(text)
        self._num_sure = self._length - text.endswith(REPLACEMENT)

    def _shrink(self) -> None:
        """Drop the older half of the window, if the newer half's text then ends as the text of both does.

        The newer half may begin in the middle of a character, whose bytes then become replacement characters. Behind
        these, the newer half's text equals the end of the whole text.
        """
        newer = self._tokens[len(self._tokens) // 2 :]
        text = self._decode(newer)
        if len(text) > MAX_STRAYS:
            self._tokens = newer
            self._measure(text)


class Detokenizer:
    """The text of one sequence, token by token. A token's cost does not grow with the text.

    The whole text equals what all tokens at once add to a text before, up to the stop string. `take_text` holds back
    characters that may become a stop string, until it is clear that they do not.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seq: Sequence) -> None:
        self.seq = seq
        self._window = TokenWindow(tokenizer, seq.params.skip_special_tokens)
        self._stops = stop_strings(tuple(seq.params.stop)) if seq.params.stop else None
        self._num_read = 0  # tokens
        self._text = io.StringIO()
        self._length = 0  # characters in the text
        self._state = 0  # the state of the search for stop strings, at the text's end
        self._num_sure = 0  # characters that are sure: the next token may change the others
        self._sure_state = 0  # the search's state behind them
        self._num_safe = 0  # sure characters that belong to no stop string, whichever tokens follow
        self._num_taken = 0
        self._stop_string: str | None = None

    @property
    def text(self) -> str:
        """The whole text so far, sure or not."""
        return self._text.getvalue()

    def update(self) -> str | None:
        """Read the sequence's new tokens; returns the stop string that ends the text, if one does."""
        for token_id in text_tokens(self.seq, self._num_read):
            if self._stop_string is not None:
                break
            self._num_read += 1
            if (new := self._window.push(token_id)) is not None:
                self._update_tail(*new)
        if self.seq.is_finished and self._stop_string is None:
            self._update_tail(self._window.finish(), is_sure=True)
            self._num_safe = self._length
        return self._stop_string

    def take_text(self) -> str:
        """Return the text that is sure to stay and was not taken before."""
        text = self._read(self._num_taken)[: self._num_safe - self._num_taken]
        self._num_taken = self._num_safe
        return text

    def _read(self, start: int) -> str:
        self._text.seek(start)
        return self._text.read()

    def _update_tail(self, tail: str, is_sure: bool) -> None:
        """Make `tail` the text behind the sure characters. An unsure tail may add characters, but change none."""
        known = self._read(self._num_sure)
        if tail.startswith(known):
            self._add(tail[len(known) :])
        elif is_sure:
            self._length, self._state = self._num_sure, self._sure_state
            self._add(tail)
        if is_sure and self._stop_string is None:
            self._num_sure, self._sure_state = self._length, self._state
            self._num_safe = self._length - (self._stops.num_open(self._state) if self._stops else 0)

    def _add(self, text: str) -> None:
        found = None
        if self._stops is not None:
            self._state, found = self._stops.find(self._state, text)
        self._text.seek(self._length)
        self._text.write(text)
        self._text.truncate()
        if found and self._num_read > self.seq.params.min_tokens:
            start, end = (self._length + place for place in found)
            self._stop_string = self._read(start)[: end - start]
            self._length = self._num_safe = end if self.seq.params.include_stop_str_in_output else start
            self._text.truncate(self._length)
        else:
            self._length += len(text)


def text_tokens(seq: Sequence, start: int = 0) -> list[int]:
    """Return the generated tokens from `start` on that belong to the text, with the stop token only if it is kept."""
    end = len(seq)
    if seq.ended_by_token and not seq.params.include_stop_str_in_output:
        end -= 1
    return seq.token_ids[seq.num_prompt_tokens + start : end].tolist()


def decode(tokenizer: PreTrainedTokenizerBase, seq: Sequence) -> str:
    """Decode a sequence's whole text at once."""
    return TokenDecoder(tokenizer, seq.params.skip_special_tokens)(text_tokens(seq))
