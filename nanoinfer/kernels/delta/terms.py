"""What the gated delta rule takes of each token by itself: queries, keys, values, decays and strengths."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

L2_EPS = tl.constexpr(1e-6)  # within the root


def split_heads(qkv: Tensor, key_heads: int, value_heads: int, value_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, [tokens, value heads, key dim], and v, [tokens, value heads, value dim], in float32.

    q and k get length 1, and q then key_dim^-0.5. Value head h has key head h // (value heads / key heads).

    qkv: [tokens, channels], whose channels are q | k | v
    """
    v = qkv[:, -value_heads * value_dim :].float().unflatten(1, (value_heads, value_dim))
    qk = qkv[:, : -value_heads * value_dim].float().unflatten(1, (2, key_heads, -1))
    qk = qk * torch.rsqrt(qk.square().sum(-1, keepdim=True) + L2_EPS.value)
    q, k = qk.repeat_interleave(value_heads // key_heads, dim=2).unbind(1)
    return q * q.shape[-1] ** -0.5, k, v


def keys_of(qkv: Tensor, key_heads: int, value_heads: int, value_dim: int) -> tuple[Tensor, Tensor]:
    """Return the keys as they are, [tokens, key heads, key dim], and what gives them length 1: [tokens, value heads].

    qkv: as for split_heads
    """
    keys = qkv[:, : -value_heads * value_dim].unflatten(1, (2, key_heads, -1))[:, 1]
    factors = torch.rsqrt(keys.float().square().sum(-1) + L2_EPS.value)
    return keys, factors.repeat_interleave(value_heads // key_heads, dim=1)


def gates(a: Tensor, b: Tensor, log_decay: Tensor, dt_bias: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """Return the logarithms of decays, and the strengths of updates, both [tokens, value heads] in float32.

    a, b: [tokens, value heads]; log_decay, dt_bias: [value heads]; largest: as for delta_rows
    """
    decays, strengths = -log_decay.float().exp() * F.softplus(a.float() + dt_bias.float()), b.float().sigmoid()
    return decays, strengths if largest == 1 else strengths * largest


@triton.jit
def length_factor(x, axis: tl.constexpr):
    """Return what gives queries or keys, in float32, length 1."""
    return tl.rsqrt(tl.sum(x * x, axis=axis) + L2_EPS)


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)) of a float32 number."""
    e = tl.exp(-tl.abs(x))
    # log(1 + e) without the error of 1 + e (Kahan): where e is small, decays near 1 multiply over many tokens.
    grown = 1.0 + e
    log1p = tl.where(grown == 1.0, e, tl.log(grown) * (e / tl.maximum(grown - 1.0, 1e-10)))
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def gates_of(a, b, log_decay, dt_bias, LARGEST: tl.constexpr):
    """`gates` inside a kernel."""
    step = softplus(a.to(tl.float32) + dt_bias.to(tl.float32))
    return -tl.exp(log_decay.to(tl.float32)) * step, LARGEST * tl.sigmoid(b.to(tl.float32))


@triton.jit
def decay_of(log_decay):
    """Return exp of a negative number. Near 0, where thousands of them are multiplied, a GPU's exp errs to one side."""
    x = log_decay
    series = x * (1.0 + x / 2 * (1.0 + x / 3 * (1.0 + x / 4 * (1.0 + x / 5))))
    return tl.where(x > -0.1, 1.0 + series, tl.exp(x))
