"""Parts: divides a text that grows into its reasoning and its answer."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from nanoinfer.requests.reasoning.stages import Next, Part, Stage


class Cut(NamedTuple):
    """A marker in the text: characters from start to end, of which none may be shown, and the part behind it."""

    start: int
    end: int
    part: Part | None


class Parts:
    """What a growing output has of each part.

    Markers are found in the bytes of tokens, special ones included, however these spell them. The text may lag behind
    its tokens, and end before them, at a stop string. Characters that may be the beginning of a marker are held back.
    """

    def __init__(
        self,
        stages: tuple[Stage, ...],
        first: int,
        spell: Callable[[int], bytes],
        length_of: Callable[[list[int]], int],
    ) -> None:
        """first: the stage in which the output begins; spell: returns a token's bytes, also those of a special one.

        length_of: returns how many characters of the text tokens make
        """
        self._stages, self._spell, self._length_of = stages, spell, length_of
        self._stage, self._part = stages[first], stages[first].part
        self._tokens: list[int] = []
        self._starts = [0]  # of each token's bytes, among all; then the end of all
        self._seen = b""  # the newest bytes of the stage, as many as matter
        self._cuts: deque[Cut] = deque()  # markers that the text has not come to
        self._text, self._base, self._told = "", 0, 0  # what is left of the text, its first place, and what was told

    def read(self, token_ids: list[int], text: str, is_finished: bool) -> dict[Part, str]:
        """Take new tokens and new text; returns what is new of each part. is_finished: no more will come"""
        for token_id in token_ids:
            self._push(token_id)
        self._text += text
        known = self._base + len(self._text)
        sure = known if is_finished else known - self._held
        new: dict[Part, str] = {"reasoning": "", "answer": ""}
        while self._cuts and self._cuts[0].start <= sure:
            cut = self._cuts.popleft()
            self._tell(cut.start, new)
            self._part, self._told = cut.part, max(self._told, cut.end)
        self._tell(sure, new)
        self._text, self._base = self._text[max(0, self._told - self._base) :], min(known, max(self._told, self._base))
        return new

    def _tell(self, end: int, new: dict[Part, str]) -> None:
        """Tell the text up to a place."""
        if end > self._told:
            if self._part is not None:
                new[self._part] += self._text[self._told - self._base : end - self._base]
            self._told = end

    def _push(self, token_id: int) -> None:
        """Read a token's bytes, in which stages may end."""
        piece = self._spell(token_id)
        self._tokens.append(token_id)
        self._starts.append(self._starts[-1] + len(piece))
        self._seen += piece
        while (found := self._first_mark()) is not None:
            start, mark, behind = found
            before, rest = self._seen[:start], self._seen[start + len(mark) :]
            self._stage = self._stages[behind(before) if callable(behind) else behind]
            end = self._starts[-1] - len(rest)
            self._cuts.append(Cut(self._place(end - len(mark)), self._place(end), self._stage.part))
            self._seen = rest
        longest = max((len(mark) for mark, _ in self._stage.marks), default=0)
        if self._stage.part is not None:  # a header stays whole: it says which stage comes next
            self._seen = self._seen[max(0, len(self._seen) - longest + 1) :] if longest else b""

    def _first_mark(self) -> tuple[int, bytes, Next] | None:
        found = [(at, mark, behind) for mark, behind in self._stage.marks if (at := self._seen.find(mark)) >= 0]
        return min(found, key=lambda each: each[0], default=None)

    def _place(self, byte: int) -> int:
        """Return the place in the text of a byte that begins a character."""
        token = bisect_left(self._starts, byte)
        if self._starts[token] == byte:
            token = bisect_right(self._starts, byte) - 1  # what has no bytes stands before
            return self._length_of(self._tokens[:token])
        token -= 1
        own = self._spell(self._tokens[token])[: byte - self._starts[token]]
        return self._length_of(self._tokens[:token]) + len(own.decode(errors="replace"))

    @property
    def _held(self) -> int:
        """How many characters at the end may be the beginning of a marker, at most."""
        lengths = [
            length
            for mark, _ in self._stage.marks
            for length in range(1, min(len(mark), len(self._seen) + 1))
            if self._seen.endswith(mark[:length])
        ]
        return max(lengths, default=0)
