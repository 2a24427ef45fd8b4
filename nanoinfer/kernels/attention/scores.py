"""From a query's products with the keys to its scores: the scale, and the soft cap of Gemma 2 (Team Gemma, 2024)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634


def capped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float) -> Tensor:
    """Attend with scores softcap * tanh(scale * product / softcap), which torch's own attention cannot.

    q: [..., queries, head_dim]; k, v: [..., keys, head_dim]
    mask: True where a query sees a key, of a shape that goes with [..., queries, keys]; None: everywhere
    Returns q's shape. The scores and their softmax are float32.
    """
    scores = softcap * torch.tanh(q.float() @ k.float().transpose(-1, -2) * (scale / softcap))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(dim=-1).to(v.dtype) @ v


def in_log2(scale: float, softcap: float | None) -> tuple[float, float]:
    """The factor and CAP that scores_in_log2 takes."""
    if softcap is None:
        return scale * LOG2_E, 0.0
    return 2 * LOG2_E * scale / softcap, softcap * LOG2_E


@triton.jit
def scores_in_log2(products, factor, CAP: tl.constexpr):
    """The scores times log2(e), so that exp2 takes them; CAP is 0 where there is no soft cap."""
    scores = products * factor
    if CAP > 0:
        # tanh(x) = 1 - 2 / (exp(2x) + 1) goes to -1 and 1 where exp leaves float32's range.
        scores = CAP * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
    return scores
