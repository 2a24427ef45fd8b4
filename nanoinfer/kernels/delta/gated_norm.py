"""RMSNorm of each head, times SiLU of a gate."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight * silu(gate), the mean over a head, [tokens, heads * dim] in x's dtype.

    x: [tokens, heads, dim]; gate: [tokens, heads * dim], may be some columns of a wider matrix; weight: [dim]
    """
    return gated_norm_reference(x, gate, weight, eps)


def gated_norm_reference(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """gated_norm in torch; as transformers' Qwen3_5RMSNormGated it rounds to x's dtype before the weight multiplies."""
    normed = F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype) * weight
    return (normed.flatten(1) * F.silu(gate.float())).to(x.dtype)
