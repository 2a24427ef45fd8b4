"""Thoughts that are closed where their budgets are spent. Few requests ask for it: this is plain torch everywhere."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NO_TOKEN = -1  # none is put in
NOWHERE = 2**31 - 1


class Thoughts(NamedTuple):
    """Where the thoughts of rows begin, and how long they may be.

    starts: [rows] int32, where the outputs begin; are_open: [rows] bool, whether thoughts begin there, too
    budgets: [rows] int32, in tokens; 2^31 - 1: none
    """

    starts: Tensor
    are_open: Tensor
    budgets: Tensor


def forced_tokens(
    tokens: Tensor,
    positions: Tensor,
    thoughts: Thoughts,
    opening: tuple[int, ...],
    closing: tuple[int, ...],
    leaving: Tensor,
) -> Tensor:
    """Return the tokens that are to be put in at these positions, [rows] int64; NO_TOKEN: none.

    tokens: [rows, longest] int32, each row's prompt and output; positions: [rows] int32, of the tokens to be drawn
    opening, closing: the tokens that open a thought, and that close it
    leaving: [n] int64, the tokens that are put in, one after the other, which end with those of closing
    """
    begun = _end_of_first(tokens, thoughts.starts, positions, opening)
    begun = torch.where(thoughts.are_open, thoughts.starts, begun)
    is_closed = _end_of_first(tokens, begun, positions, closing) < NOWHERE
    spent = positions.long() - begun.long() - thoughts.budgets.long()  # less than 0: the budget is not
    is_due = (begun < NOWHERE) & ~is_closed & (spent >= 0)
    return leaving[spent.clamp(0, len(leaving) - 1)].where(is_due, NO_TOKEN)


def _end_of_first(tokens: Tensor, begin: Tensor, end: Tensor, sequence: tuple[int, ...]) -> Tensor:
    """Return the place behind a sequence's first occurrence in tokens `begin` to `end` of each row; NOWHERE: none."""
    places = tokens.shape[1] - len(sequence) + 1
    if places <= 0:
        return torch.full_like(begin, NOWHERE)
    at = torch.arange(places, device=tokens.device)
    found = (at >= begin[:, None]) & (at + len(sequence) <= end[:, None])
    for offset, token_id in enumerate(sequence):
        found &= tokens[:, offset : offset + places] == token_id
    first = torch.where(found, at, NOWHERE - len(sequence)).amin(dim=1) + len(sequence)
    return first.to(begin.dtype)


class Forced(NamedTuple):
    """Tokens that are put in, whatever else may be drawn.

    token_ids: [rows] int64, NO_TOKEN for none; logits: [rows, 1] float32, which they have before any is left out
    """

    token_ids: Tensor
    logits: Tensor

    @staticmethod
    def of(logits: Tensor, token_ids: Tensor) -> Forced:
        """Return these tokens with their logits, of [rows, vocabulary]; 0 where one is not finite."""
        own = logits.gather(1, token_ids.clamp(min=0)[:, None])
        return Forced(token_ids, own.where(own.isfinite(), 0))

    def put(self, logits: Tensor) -> Tensor:
        """Return the logits, in which rows that get a token have -inf for all others."""
        is_due, token_ids = (self.token_ids >= 0)[:, None], self.token_ids.clamp(min=0)[:, None]
        alone = logits.masked_fill(is_due, float("-inf"))
        return alone.scatter_(1, token_ids, self.logits.where(is_due, alone.gather(1, token_ids)))
