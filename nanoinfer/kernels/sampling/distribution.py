"""The distribution that a token was drawn from. Few requests ask for it, so this is plain torch on every device."""

from __future__ import annotations

import torch
from torch import Tensor

from nanoinfer.kernels.sampling.cutoff import Cutoff


def distribution(logits: Tensor, temperatures: Tensor, drawn: Tensor, cutoff: Cutoff | None) -> Tensor:
    """Return logits / T, [rows, vocabulary] float32, with -inf for each token that could not be drawn.

    logits: [rows, vocabulary] float32; temperatures: [rows] float32; drawn: [rows], the drawn tokens
    cutoff: as for the draw, see kernels.sampling.cutoff

    At temperature 0 only the drawn token could be drawn.
    """
    ids = torch.arange(logits.shape[1], device=logits.device)
    kept = (temperatures[:, None] > 0) | (ids == drawn[:, None])
    if cutoff is not None:
        lowest, first = (column[:, None] for column in cutoff)
        kept &= (logits > lowest) | ((logits == lowest) & (ids >= first))
    return at_temperature(logits, temperatures).masked_fill(~kept, float("-inf"))


def at_temperature(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Return logits / T, [rows, vocabulary]; at temperature 0 the logits themselves. temperatures: [rows] float32"""
    return logits / temperatures.where(temperatures > 0, 1)[:, None]
