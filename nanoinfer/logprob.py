"""LogProb: a token's log-probability, which also knows the token's rank and text."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple, Protocol

import numpy as np

MINUS_INFINITY = float("-inf")


class Decode(Protocol):
    """Makes text of tokens, and bytes of one."""

    def __call__(self, token_ids: list[int]) -> str:
        """Return the text of tokens."""

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token."""


class LogProb(float):
    """A token's log-probability: a float with these attributes, of which all but the last are vLLM's.

    logprob: the log-probability itself
    rank: one more than the number of likelier tokens; equally likely tokens share a rank
    decoded_token: what this token adds to a text, spaces and special tokens included; None without a tokenizer, and
        with detokenize=False
    decoded_bytes: the same in UTF-8. A token may be a part of a character: those of a text's tokens, one after the
        other, are the text
    """

    __slots__ = ("_bytes", "_decode", "_token", "rank")

    rank: int
    _token: Any
    _decode: Decode | None
    _bytes: bytes | None

    def __new__(
        cls,
        value: float,
        rank: int,
        token: int | str | None = None,
        decode: Decode | None = None,
        decoded_bytes: bytes | None = None,
    ) -> LogProb:
        """token: the token's text; or its id, from which `decode` makes text and bytes when somebody asks for them."""
        self = super().__new__(cls, value)
        self.rank, self._token, self._decode, self._bytes = rank, token, decode, decoded_bytes
        return self

    @property
    def logprob(self) -> float:
        """The log-probability itself."""
        return float(self)

    @property
    def decoded_token(self) -> str | None:
        """The token's text."""
        return self._token if self._decode is None else self._decode([self._token])

    @property
    def decoded_bytes(self) -> bytes | None:
        """The token's bytes."""
        return self._bytes if self._decode is None else self._decode.bytes_of(self._token)

    def __reduce__(self) -> tuple[Any, ...]:  # with the text and the bytes, not the tokenizer
        return LogProb, (float(self), self.rank, self.decoded_token, None, self.decoded_bytes)


class Candidates(NamedTuple):
    """A token and the most likely tokens in its place.

    token_ids: the token itself, then the most likely ones in their order; values: their log-probabilities
    rank: the token's own

    A likely token of log-probability -inf could not be drawn.
    """

    token_ids: list[int]
    values: list[float]
    rank: int

    def logprobs(self, decode: Decode | None) -> dict[int, LogProb]:
        """Return token id -> log-probability, for the token itself and the likely ones that could be drawn.

        decode: makes text from tokens; None: there is no tokenizer
        """
        text = decode is not None
        if len(self.token_ids) == 1:  # mostly
            (token_id,) = self.token_ids
            return {token_id: LogProb(self.values[0], self.rank, token_id if text else None, decode)}
        ranks, rank = [self.rank], 1
        for place in range(1, len(self.values)):
            if place > 1 and self.values[place] < self.values[place - 1]:
                rank = place
            ranks.append(rank)
        return {
            token_id: LogProb(value, rank, token_id if text else None, decode)
            for token_id, value, rank in zip(self.token_ids, self.values, ranks, strict=True)
            if value != MINUS_INFINITY or token_id == self.token_ids[0]
        }


class CandidatesLog:
    """The Candidates of successive tokens, all of one number.

    It keeps numbers alone: of an object for each token, Python's garbage collector would look at all again and again.
    """

    __slots__ = ("_ids", "_ranks", "_values", "_width")

    def __init__(self) -> None:
        self._width = 1  # of an entry
        self._ids, self._values, self._ranks = array("i"), array("f"), array("i")

    def append(self, token_ids: list[int], values: list[float], rank: int) -> None:
        """Add an entry; the arguments are Candidates' fields."""
        self._width = len(token_ids)
        self._ids.extend(token_ids)
        self._values.extend(values)
        self._ranks.append(rank)

    def clear(self) -> None:
        """Forget all entries."""
        for column in (self._ids, self._values, self._ranks):
            del column[:]

    @property
    def has_nan(self) -> bool:
        """Whether some of the values are NaN."""
        return bool(np.isnan(np.frombuffer(self._values, dtype=np.float32)).any())

    def __len__(self) -> int:
        return len(self._ranks)

    def since(self, start: int) -> CandidatesLog:
        """Return the entries from number `start` on."""
        if start == 0:
            return self
        log = CandidatesLog()
        begin, log._width = start * self._width, self._width
        log._ids, log._values, log._ranks = self._ids[begin:], self._values[begin:], self._ranks[start:]
        return log

    def logprobs(self, decode: Decode | None) -> list[dict[int, LogProb]]:
        """Return the entries as Candidates.logprobs has them."""
        return [self._entry(index).logprobs(decode) for index in range(len(self))]

    def _entry(self, index: int) -> Candidates:
        own = slice(index * self._width, (index + 1) * self._width)
        return Candidates(self._ids[own].tolist(), self._values[own].tolist(), self._ranks[index])
