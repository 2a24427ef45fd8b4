"""Sequences of tokens that may not be generated. Few requests have any, so this is plain torch on every device."""

from __future__ import annotations

import torch
from torch import Tensor


def ban_sequences(
    logits: Tensor, tokens: Tensor, positions: Tensor, starts: Tensor, rows: Tensor, sequences: Tensor
) -> Tensor:
    """Return the logits, [rows, vocabulary], with -inf for each token that would complete a sequence.

    tokens: [rows, longest] int32, each row's prompt and output
    positions: [rows] int32, of the tokens to be drawn; starts: [rows] int32, where the outputs begin
    rows: [n] int64, the rows that the sequences are for
    sequences: [n, length] int64; a shorter one begins with negative numbers
    """
    first, last = sequences[:, :-1], sequences[:, -1]
    at = positions[rows, None].long() + torch.arange(-first.shape[1], 0, device=tokens.device)
    before = tokens[rows[:, None], at.clamp(min=0)]
    is_there = (first < 0) | ((before == first) & (at >= starts[rows, None]))
    change = torch.zeros_like(last, dtype=logits.dtype).masked_fill(is_there.all(dim=1), float("-inf"))
    return logits.index_put((rows, last), change, accumulate=True)
