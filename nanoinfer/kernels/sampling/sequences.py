"""Sequences of tokens that may not be generated. Few requests have any, so this is plain torch on every device."""

from __future__ import annotations

import torch
from torch import Tensor


def ban_sequences(logits: Tensor, tokens: Tensor, positions: Tensor, starts: Tensor, sequences: Tensor) -> Tensor:
    """Return the logits, [rows, vocabulary], with -inf for each token that would complete a sequence.

    tokens: [rows, longest] int32, each row's prompt and output; of a row without sequences any numbers, and too few
    positions: [rows] int32, of the tokens to be drawn; starts: [rows] int32, where the outputs begin
    sequences: [rows, n, length] int64; a shorter one begins with negative numbers, and one that is no sequence has no
        others
    """
    first, last = sequences[..., :-1], sequences[..., -1]
    at = positions[:, None].long() + torch.arange(-first.shape[2], 0, device=tokens.device)
    before, is_output = tokens.gather(1, at.clamp(0, tokens.shape[1] - 1)), at >= starts[:, None]
    is_there = (first < 0) | ((before[:, None] == first) & is_output[:, None])
    is_banned = is_there.all(dim=2) & (last >= 0)
    change = torch.zeros_like(last, dtype=logits.dtype).masked_fill(is_banned, float("-inf"))
    return logits.scatter_add(1, last.clamp(min=0), change)
