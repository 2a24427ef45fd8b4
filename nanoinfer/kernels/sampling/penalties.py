"""Penalties for tokens that occurred before. Few requests ask for them, so this is plain torch on every device."""

from __future__ import annotations

import torch
from torch import Tensor


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
    tokens: [rows, longest] int64, each row's prompt and output, of which the first `lengths` are valid
    lengths, prompt_lengths: [rows] int32
    repetition: [rows], for tokens of prompt and output: divides a positive logit and multiplies a negative one (Keskar
        et al., 2019)
    presence: [rows], for tokens of the output: subtracted from the logit once
    frequency: [rows], for tokens of the output: subtracted from the logit once for each time that the token occurs
    """
    at = torch.arange(tokens.shape[1], device=tokens.device)
    is_valid = at < lengths[:, None]
    tokens = tokens.where(is_valid, 0)
    seen = torch.zeros_like(logits).scatter_add_(1, tokens, is_valid.float()) > 0
    is_output = is_valid & (at >= prompt_lengths[:, None])
    counts = torch.zeros_like(logits).scatter_add_(1, tokens, is_output.float())

    factor = torch.where(logits > 0, 1 / repetition[:, None], repetition[:, None])
    logits = torch.where(seen, logits * factor, logits)
    return logits - frequency[:, None] * counts - presence[:, None] * (counts > 0)
