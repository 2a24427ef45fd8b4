"""Turns a query's products with keys into scores: by the scale, and the soft cap of Gemma 2 (Gemma Team, 2024)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634


def scores_of(q: Tensor, k: Tensor, scale: float, softcap: float | None) -> Tensor:
    """scale * product, or softcap * tanh(scale * product / softcap), in float32: [..., queries, keys].

    q: [..., queries, head_dim]; k: [..., keys, head_dim]
    """
    products = q.float() @ k.float().transpose(-1, -2)
    return products.mul_(scale) if softcap is None else products.mul_(scale / softcap).tanh_().mul_(softcap)


def capped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float) -> Tensor:
    """Attend with capped scores, which torch's own attention cannot do.

    q: [..., queries, head_dim]; k, v: [..., keys, head_dim]
    mask: True where a query sees a key, of a shape that broadcasts to [..., queries, keys]; None: everywhere
    Returns q's shape. The scores and their softmax are float32.
    """
    scores = scores_of(q, k, scale, softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(dim=-1).to(v.dtype) @ v


def in_log2(scale: float, softcap: float | None) -> tuple[float, float]:
    """Return the factor and CAP that scores_in_log2 takes."""
    if softcap is None:
        return scale * LOG2_E, 0.0
    return 2 * LOG2_E * scale / softcap, softcap * LOG2_E


@triton.jit
def scores_in_log2(products, factor, CAP: tl.constexpr):
    """Return the scores times log2(e), so that exp2 of them is exp of the scores; CAP: 0 if there is no soft cap."""
    scores = products * factor
    if CAP > 0:
        # tanh(x) = 1 - 2 / (exp(2x) + 1) goes to -1 and 1 where exp leaves float32's range.
        scores = CAP * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
    return scores
