"""Penalties for tokens that occurred before. Few requests ask for them, so this is plain torch on every device."""

from __future__ import annotations

import torch
from torch import Tensor

TOKENS_AT_ONCE = 4096  # of each row: more would take more memory


def penalize(
    logits: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    prompt_lengths: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Make tokens that have occurred less likely, or more likely; returns the new logits, [rows, vocabulary].

    logits: [rows, vocabulary] float32
    tokens: [rows, longest] int32 or int64, each row's prompt and output, of which the first `lengths` are valid
    lengths, prompt_lengths: [rows] int32
    repetition: [rows], for tokens of prompt and output: divides a positive logit and multiplies a negative one (Keskar
        et al., 2019)
    presence: [rows], for tokens of the output: subtracted from the logit once
    frequency: [rows], for tokens of the output: subtracted from the logit once for each time that the token occurs
    """
    seen, counts = torch.zeros_like(logits), torch.zeros_like(logits)
    for start in range(0, tokens.shape[1], TOKENS_AT_ONCE):
        some = tokens[:, start : start + TOKENS_AT_ONCE]
        at = torch.arange(start, start + some.shape[1], device=tokens.device)
        is_valid = at < lengths[:, None]
        some = some.where(is_valid, 0).long()
        seen.scatter_add_(1, some, is_valid.float())
        counts.scatter_add_(1, some, (is_valid & (at >= prompt_lengths[:, None])).float())

    factor = torch.where(logits > 0, 1 / repetition[:, None], repetition[:, None])
    logits = torch.where(seen > 0, logits * factor, logits)
    return logits - frequency[:, None] * counts - presence[:, None] * (counts > 0)
