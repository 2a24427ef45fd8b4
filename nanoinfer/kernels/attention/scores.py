"""Turns a query's products with keys into scores: by the scale, and the soft cap of Gemma 2 (Gemma Team, 2024).

A sink is a score that each query of a head has beside those of the keys, for no value (gpt-oss: OpenAI, 2025).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)


def scores_of(q: Tensor, k: Tensor, scale: float, softcap: float | None) -> Tensor:
    """scale * product, or softcap * tanh(scale * product / softcap), in float32: [..., queries, keys].

    q: [..., queries, head_dim]; k: [..., keys, head_dim]
    """
    products = q.float() @ k.float().transpose(-1, -2)
    return products.mul_(scale) if softcap is None else products.mul_(scale / softcap).tanh_().mul_(softcap)


def explicit_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend with capped scores or with sinks, which torch's own attention cannot do.

    q: [..., queries, head_dim]; k, v: [..., keys, head_dim]
    mask: True where a query sees a key, of a shape that broadcasts to [..., queries, keys]; None: everywhere
    sinks: float32, of a shape that broadcasts to [..., queries]; None: there are none
    Returns q's shape. The scores and their softmax are float32.
    """
    scores = scores_of(q, k, scale, softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return softmax_with_sinks(scores, None if sinks is None else sinks.unsqueeze(-1), dim=-1).to(v.dtype) @ v


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None, dim: int) -> Tensor:
    """Return exp(score) / (sum of exp(scores) + exp(sink)), with the sum over a dimension.

    sinks: of a shape that broadcasts to that of the scores, but for 1 in this dimension; None: there are none
    """
    if sinks is None:
        return scores.softmax(dim)
    return (scores - torch.logaddexp(scores.logsumexp(dim, keepdim=True), sinks)).exp_()


def in_log2(scale: float, softcap: float | None) -> tuple[float, float]:
    """Return the factor and CAP that scores_in_log2 takes."""
    if softcap is None:
        return scale * LOG2_E.value, 0.0
    return 2 * LOG2_E.value * scale / softcap, softcap * LOG2_E.value


@triton.jit
def scores_in_log2(products, factor, CAP: tl.constexpr):
    """Return the scores times log2(e), so that exp2 of them is exp of the scores; CAP: 0 if there is no soft cap."""
    scores = products * factor
    if CAP > 0:
        # tanh(x) = 1 - 2 / (exp(2x) + 1) goes to -1 and 1 where exp leaves float32's range.
        scores = CAP * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
    return scores


@triton.jit
def load_sinks(sinks_ptr, head, mask):
    """Load heads' sinks times log2(e), as float32; where the mask is False, the score of a key that nobody sees."""
    return tl.maximum(tl.load(sinks_ptr + head, mask=mask, other=-1e30) * LOG2_E, -1e30)
