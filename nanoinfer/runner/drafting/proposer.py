"""Proposer: what gives a verifying step its guesses; and those that ask a Drafter."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from nanoinfer.checks import short
from nanoinfer.drafting.drafter import Drafter, RowTexts
from nanoinfer.kernels.drafting.pack import Places
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.runner.drafting.texts import DraftingRows, Texts
from nanoinfer.runner.message import ChunkMessage
from nanoinfer.runner.steps.prefill_inputs import PrefillInputs

MOST_SHOWN = 60  # characters of a value in an error message

Form = tuple[torch.dtype, tuple[int, ...], torch.device]  # of a tensor


class Proposer(ABC):
    """Proposes tokens that may follow the rows of a batch, all of it on the device.

    It may see all steps, and the model's hidden states, in the order in which these methods stand here. By default it
    looks away.
    """

    def see_prompts(self, prompts: PrefillInputs, chunks: list[ChunkMessage], hidden: Tensor) -> None:
        """See chunks of prompts, which the model has computed; hidden: [tokens, hidden_size]"""

    def see_joining(self, rows: slice, prompts: PrefillInputs, hidden: Tensor) -> None:
        """See which rows get the prompts that are complete. prompts, hidden: as for see_prompts"""

    def catch_up(self, chunks: list[ChunkMessage]) -> None:
        """See tokens that plain steps have brought, before a verifying step, if a draft model makes guesses."""

    def begin_plain(self, num_rows: int) -> None:
        """Begin a plain step of so many rows."""

    @abstractmethod
    def propose(self, num_rows: int, guesses: int) -> tuple[Tensor, Tensor]:
        """Begin a verifying step: return guesses for its rows, [rows, n] int32, and how many each has, [rows] int32.

        guesses: the step has places for so many; n is at most the option max_guesses
        """

    def see_rows(self, hidden: Tensor) -> None:
        """See a plain step, which the model has computed; hidden: [rows, hidden_size]"""

    def see_places(self, places: Places, hidden: Tensor, filled: Tensor | None) -> None:
        """See a verifying step, which the model has computed.

        hidden: [places, hidden_size]; filled: the numbers of the places that it is of; None: of all
        """

    def see_kept(self, places: Places, kept: Tensor) -> None:
        """See what a verifying step has kept. kept: as for accept_guesses, which has moved the rows on"""


class TextProposer(Proposer):
    """The Proposer that lets a Drafter read the rows' texts."""

    def __init__(self, drafter: Drafter, texts: Texts, rows: DraftingRows, most: int) -> None:
        """most: guesses of a row"""
        self._drafter, self._texts, self._rows, self._most = drafter, texts, rows, most

    def propose(self, num_rows: int, guesses: int) -> tuple[Tensor, Tensor]:
        """Propose what the Drafter does. Raises ValueError if that is not what Drafter says."""
        texts, slots = self._texts, self._rows.texts[:num_rows]
        own = RowTexts(texts.tokens, texts.lengths, texts.members, slots, self._rows.groups[:num_rows])
        told = self._drafter.propose(own, self._most)
        forms = (torch.int32, (num_rows, self._most), slots.device), (torch.int32, (num_rows,), slots.device)
        _check(f"{type(self._drafter).__name__}.propose", told, dict(zip(("guesses", "counts"), forms, strict=True)))
        proposed, counts = told
        return proposed, counts


class OneForAll(Proposer):
    """The Proposer of several ranks that guesses on rank 0 alone, and lets the others know.

    A user's Drafter may remember, or toss coins. Copies of it would soon guess otherwise, and ranks must verify alike.
    """

    def __init__(self, own: Proposer, tp: TensorParallel, device: torch.device, most: int) -> None:
        """own: rank 0's is asked; most: guesses of a row"""
        self._own, self._tp, self._device, self._most = own, tp, device, most

    def propose(self, num_rows: int, guesses: int) -> tuple[Tensor, Tensor]:
        """Propose what rank 0's own Proposer does."""
        if self._tp.rank == 0:
            proposed, counts = self._own.propose(num_rows, guesses)
            told = torch.cat([proposed, counts[:, None]], dim=1)
        else:
            told = torch.zeros((num_rows, self._most + 1), dtype=torch.int32, device=self._device)
        of_rank_0 = self._tp.all_gather(told)[0]
        return of_rank_0[:, :-1], of_rank_0[:, -1]


def _check(name: str, told: object, asked: dict[str, Form]) -> None:
    """Raise ValueError unless a Drafter has returned tensors of these forms. name: of its method"""
    if not isinstance(told, (tuple, list)) or len(told) != len(asked):
        wanted = " and ".join(f"{noun} of {_told(form)}" for noun, form in asked.items())
        raise ValueError(f"speculation: {name} must return {wanted}, not {short(told, MOST_SHOWN)}")
    for (noun, form), numbers in zip(asked.items(), told, strict=True):
        found = (numbers.dtype, tuple(numbers.shape), numbers.device) if isinstance(numbers, Tensor) else None
        if found != form:
            what = short(numbers, MOST_SHOWN) if found is None else f"of {_told(found)}"
            raise ValueError(f"speculation: {name} must return {noun} of {_told(form)}, not {what}")


def _told(form: Form) -> str:
    dtype, shape, device = form
    return f"{dtype} and shape {list(shape)} on {device}"
