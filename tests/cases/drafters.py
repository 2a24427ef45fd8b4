"""Drafters whose guesses are good or bad on purpose: none may change a token."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nanoinfer.drafting.drafter import RowTexts

VOCAB = 2048  # of the bundled model


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


class Prophet:
    """Guesses what follows a text in one of those that it knows, but where it is to be wrong. A graph can record it."""

    def __init__(self, known: list[list[int]], right: tuple[bool, ...] = (True,)) -> None:
        """right: in the first step, in the second, and so on, over and over"""
        self._known = pad_sequence([torch.tensor(text, dtype=torch.int32) for text in known], batch_first=True)
        self._lengths = torch.tensor([len(text) for text in known])
        self._right, self._step = torch.tensor(right), torch.tensor([0])

    def propose(self, rows: RowTexts, most: int) -> tuple[Tensor, Tensor]:
        device = rows.slots.device
        if self._known.device != device:  # in the first call, which no graph records
            self._known, self._lengths, self._right, self._step = (
                tensor.to(device) for tensor in (self._known, self._lengths, self._right, self._step)
            )
        slots = rows.slots.clamp(min=0).long()
        begins, length = rows.lengths[slots].long()[:, None], self._known.shape[1]
        texts = F.pad(rows.tokens[slots, :length], (0, max(0, length - rows.tokens.shape[1])))
        is_equal = (texts[:, None] == self._known) | (torch.arange(length, device=device) >= begins[:, None])
        fits = is_equal.all(dim=2) & (begins > 0) & (begins <= self._lengths)
        text = fits.int().argmax(dim=1, keepdim=True)
        at = begins + torch.arange(most, device=device)
        is_known = fits.any(dim=1, keepdim=True) & (at < self._lengths[text])
        follows = self._known[text, at.clamp(max=length - 1)].where(is_known, 0)  # and on behind the end
        guesses = follows.where(self._right[self._step % len(self._right)], follows ^ 1)
        self._step += 1
        return guesses.int(), torch.full_like(rows.slots, most)


class Moody:
    """Guesses by the process that it is in and by how often it was asked. It has a lock, which cannot be copied."""

    def __init__(self) -> None:
        self.num_calls, self._lock = 0, threading.Lock()

    def __repr__(self) -> str:
        return "<Moody>"  # in names of tests, which all processes must have alike

    def propose(self, rows: RowTexts, most: int) -> tuple[Tensor, Tensor]:
        with self._lock:
            self.num_calls += 1
        mood = random.Random(f"{os.getpid()} {self.num_calls}").randrange(VOCAB)
        guesses = rows.slots[:, None] + torch.arange(mood, mood + most, device=rows.slots.device)
        return (guesses % VOCAB).int(), (rows.slots + mood) % (most + 1)


DRAFTERS: dict[str, Callable[[list[list[int]]], Any]] = {  # of the texts that come out
    "suffix": lambda known: "suffix",
    "random": lambda known: Babbler(VOCAB),
    "right": Prophet,
    "wrong": lambda known: Prophet(known, (False,)),
    "alternating": lambda known: Prophet(known, (True, False)),
}
