"""Drafters whose guesses are good or bad on purpose: none may change a token."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nanoinfer.drafting.drafter import RowTexts

VOCAB = 2048  # of the bundled model


def texts_of(rows: RowTexts) -> list[list[int]]:
    """The text of each row; an empty row's is empty."""
    return [[] if slot < 0 else rows.tokens[slot, : int(rows.lengths[slot])].tolist() for slot in rows.slots.tolist()]


@dataclass
class Babbler:
    """Guesses random tokens of the first `vocab`, of which the last and the first come often."""

    vocab: int
    seed: int = 0

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)

    def propose(self, rows: RowTexts, most: int) -> tuple[Tensor, Tensor]:
        shape = len(rows.slots), most
        guesses = torch.randint(-2, self.vocab + 2, shape, generator=self._generator)
        counts = torch.randint(0, most + 1, shape[:1], generator=self._generator)
        return guesses.clamp(0, self.vocab - 1).int(), counts.int()

    def __getstate__(self) -> dict[str, int]:
        return {"vocab": self.vocab, "seed": self.seed}

    def __setstate__(self, state: dict[str, int]) -> None:
        self.__init__(**state)


@dataclass
class Prophet:
    """Guesses what follows a text in one of those that it knows, but where it is to be wrong.

    right: in the first step, in the second, and so on, over and over
    """

    known: list[list[int]]
    right: tuple[bool, ...] = (True,)
    _num_steps: int = field(default=0, init=False)

    def propose(self, rows: RowTexts, most: int) -> tuple[Tensor, Tensor]:
        is_right = self.right[self._num_steps % len(self.right)]
        self._num_steps += 1
        guesses = torch.zeros((len(rows.slots), most), dtype=torch.int32)
        for row, text in enumerate(texts_of(rows)):
            follows = [*self._after(text), *[0] * most][:most]  # and on behind the end
            guesses[row] = torch.tensor(follows if is_right else [token ^ 1 for token in follows])
        return guesses, torch.full((len(rows.slots),), most, dtype=torch.int32)

    def _after(self, text: list[int]) -> Iterable[int]:
        for known in self.known:
            if text and known[: len(text)] == text:
                return known[len(text) :]
        return []


DRAFTERS: dict[str, Callable[[list[list[int]]], Any]] = {  # of the texts that come out
    "suffix": lambda known: "suffix",
    "random": lambda known: Babbler(VOCAB),
    "right": Prophet,
    "wrong": lambda known: Prophet(known, (False,)),
    "alternating": lambda known: Prophet(known, (True, False)),
}
