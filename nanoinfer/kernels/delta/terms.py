"""What the gated delta rule takes of each token by itself: queries, keys, values, decays and strengths."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

L2_EPS = 1e-6  # within the root


def split_heads(qkv: Tensor, key_heads: int, value_heads: int, value_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, [tokens, value heads, key dim], and v, [tokens, value heads, value dim], in float32.

    q and k get length 1, and q then key_dim^-0.5. Value head h has key head h // (value heads / key heads).

    qkv: [tokens, channels], whose channels are q | k | v
    """
    v = qkv[:, -value_heads * value_dim :].float().unflatten(1, (value_heads, value_dim))
    qk = qkv[:, : -value_heads * value_dim].float().unflatten(1, (2, key_heads, -1))
    qk = qk * torch.rsqrt(qk.square().sum(-1, keepdim=True) + L2_EPS)
    q, k = qk.repeat_interleave(value_heads // key_heads, dim=2).unbind(1)
    return q * q.shape[-1] ** -0.5, k, v


def gates(a: Tensor, b: Tensor, log_decay: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logarithms of decays, and the strengths of updates, both [tokens, value heads] in float32.

    a, b: [tokens, value heads]; log_decay, dt_bias: [value heads]
    """
    return -log_decay.float().exp() * F.softplus(a.float() + dt_bias.float()), b.float().sigmoid()
