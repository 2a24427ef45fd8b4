"""Proposer: what gives a verifying step its guesses; and the one that asks a Drafter."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from nanoinfer.drafting.drafter import Drafter, RowTexts
from nanoinfer.runner.drafting.texts import DraftingRows, Texts


class Proposer(Protocol):
    """Proposes tokens that may follow the rows of a batch, all of it on the device."""

    def propose(self, num_rows: int, guesses: int) -> tuple[Tensor, Tensor]:
        """Return guesses for each of the first rows, [rows, n] int32, and how many there are, [rows] int32.

        guesses: the step has places for so many; n is at most the option max_guesses
        """
        ...


class TextProposer:
    """The Proposer that lets a Drafter read the rows' texts."""

    def __init__(self, drafter: Drafter, texts: Texts, rows: DraftingRows, most: int) -> None:
        """most: guesses of a row"""
        self._drafter, self._texts, self._rows, self._most = drafter, texts, rows, most

    def propose(self, num_rows: int, guesses: int) -> tuple[Tensor, Tensor]:
        """Propose what the Drafter does. Raises ValueError if its tensors have another form than Drafter says."""
        texts, slots = self._texts, self._rows.texts[:num_rows]
        own = RowTexts(texts.tokens, texts.lengths, texts.members, slots, self._rows.groups[:num_rows])
        proposed, counts = self._drafter.propose(own, self._most)
        _check("guesses", proposed, (num_rows, self._most), slots.device)
        _check("counts", counts, (num_rows,), slots.device)
        return proposed, counts


def _check(name: str, numbers: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    form = numbers.dtype, tuple(numbers.shape), numbers.device.type
    if form != (asked := (torch.int32, shape, device.type)):
        raise ValueError(f"speculation: `propose` must return {name} of {_told(*asked)}, not of {_told(*form)}")


def _told(dtype: torch.dtype, shape: tuple[int, ...], device: str) -> str:
    return f"{dtype} and shape {list(shape)} on {device}"
