"""Detokenizer: a sequence's text while its tokens come, and where a stop string ends it."""

from __future__ import annotations

import io

from transformers import PreTrainedTokenizerBase

from nanoinfer.engine.sequence import Sequence

REPLACEMENT = "\ufffd"  # what a decoder makes of bytes that are no whole character
MOST_PENDING = 16  # tokens: so many without a whole character in them never become one


class Detokenizer:
    """The text of one sequence, token by token, at a cost a token that does not grow with the text.

    A character comes when its last byte has, and what may become a stop string when it is clear that it does not.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seq: Sequence) -> None:
        self.seq = seq
        self._tokenizer = tokenizer
        self._context: list[int] = []  # the tokens of the last piece: a piece is the text that tokens add to them
        self._context_text = ""
        self._pending: list[int] = []  # those after them, whose last character is not whole
        self._stops = tuple(seq.params.stop or ())
        self._reach = max(map(len, self._stops), default=1) - 1  # characters at the text's end that a stop may begin in
        self._num_read = 0  # tokens
        self._text = io.StringIO()
        self._end = ""  # of the text, as much as a stop string reaches back
        self._length = 0  # of the text, in characters
        self._num_safe = 0  # so many of them belong to no stop string, whatever comes
        self._num_taken = 0
        self._stop_string: str | None = None

    @property
    def text(self) -> str:
        """All of it that is known."""
        return self._text.getvalue()

    def update(self) -> str | None:
        """Read the sequence's new tokens; returns the stop string with which the text ends, if it does."""
        tokens = text_tokens(self.seq, self._num_read)
        for token_id in tokens:
            if self._stop_string is not None:
                break
            self._num_read += 1
            if piece := self._decode(token_id):
                self._add(piece, may_stop=self._num_read > self.seq.params.min_tokens)
        if self.seq.is_finished and self._stop_string is None:
            self._add_rest()
        return self._stop_string

    def take(self) -> str:
        """The text that is sure to stay and was not taken before."""
        text = self._read(self._num_taken)[: self._num_safe - self._num_taken]
        self._num_taken = self._num_safe
        return text

    def _decode(self, token_id: int) -> str:
        """The text that one more token completes."""
        self._pending.append(token_id)
        piece = self._pending_text()
        if piece.endswith(REPLACEMENT) and len(self._pending) < MOST_PENDING:
            return ""
        if piece:  # a special token makes none, and may be the last of many
            self._context = self._pending
            self._context_text = self._text_of(self._context)
        self._pending = []
        return piece

    def _pending_text(self) -> str:
        return self._text_of(self._context + self._pending)[len(self._context_text) :]

    def _text_of(self, tokens: list[int]) -> str:
        decoder = self._tokenizer.backend_tokenizer
        return decoder.decode(tokens, skip_special_tokens=self.seq.params.skip_special_tokens)

    def _read(self, start: int) -> str:
        self._text.seek(start)
        return self._text.read()

    def _add(self, piece: str, may_stop: bool) -> None:
        old, end = len(self._end), self._end + piece
        self._text.seek(self._length)
        self._text.write(piece)
        self._length += len(piece)
        found = [(at, stop) for stop in self._stops if (at := end.find(stop, max(0, old - len(stop) + 1))) >= 0]
        if found and may_stop:
            at, self._stop_string = min(found)
            kept = len(self._stop_string) if self.seq.params.include_stop_str_in_output else 0
            self._length += at + kept - len(end)
            self._text.truncate(self._length)
            self._num_safe = self._length
        else:
            self._end = end[-self._reach :] if self._reach else ""
            self._num_safe = self._length - self._possible_stop()

    def _possible_stop(self) -> int:
        """The length of the longest end of the text with which a stop string begins."""
        end = self._end
        for start in range(len(end)):
            for stop in self._stops:
                if stop.startswith(end[start:]):
                    return len(end) - start
        return 0

    def _add_rest(self) -> None:
        """No token will come any more: what waits for one is the text's end as it is."""
        rest, self._pending = self._pending_text(), []
        self._text.seek(self._length)
        self._text.write(rest)
        self._length += len(rest)
        self._num_safe = self._length


def text_tokens(seq: Sequence, start: int = 0) -> list[int]:
    """The generated tokens from `start` on that belong to the text: a stop token only if it is to end with it."""
    end = len(seq)
    if seq.ended_by_token and not seq.params.include_stop_str_in_output:
        end -= 1
    return seq.token_ids[seq.num_prompt_tokens + start : end].tolist()


def decode(tokenizer: PreTrainedTokenizerBase, seq: Sequence) -> str:
    """A sequence's whole text at once."""
    return tokenizer.decode(text_tokens(seq), skip_special_tokens=seq.params.skip_special_tokens)
