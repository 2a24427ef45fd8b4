"""Masks of tokens that may be drawn, in plain torch. A GPU draws rows that want no more by `draw_masked`."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_masks(logits: Tensor, masks: Tensor) -> Tensor:
    """Return the logits, [rows, vocabulary], with -inf for each token that may not be drawn.

    masks: [rows, words] int32; bit i % 32 of word i // 32 says whether token i may be drawn
    """
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    allowed = (masks[:, :, None] >> bits & 1).flatten(1)[:, : logits.shape[1]]
    return logits.masked_fill(allowed == 0, float("-inf"))
