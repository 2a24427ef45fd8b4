"""The gated delta rule for one token a row: a decode step of all rows, its convolution included."""

from __future__ import annotations

from torch import Tensor

from nanoinfer.kernels.delta.convolution import convolve_rows_reference
from nanoinfer.kernels.delta.terms import gates, split_heads


def delta_rows(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    weight: Tensor,
    log_decay: Tensor,
    dt_bias: Tensor,
    inputs: Tensor,
    matrices: Tensor,
    slots: Tensor,
    positions: Tensor,
    key_heads: int,
) -> Tensor:
    """Let each row's memory forget a little, learn its token, and answer the token's query (Yang et al., 2024).

    S = decay * S; S = S + strength * (v - S k) k^T; out = S q. decay = exp(-exp(log_decay) * softplus(a + dt_bias)),
    strength = sigmoid(b). q, k and v come out of a convolution and SiLU; then q and k get length 1, and q key_dim^-0.5.

    qkv: [rows, channels], not convolved: q | k | v, key heads * key dim, the same, value heads * value dim
    a, b: [rows, value heads]; log_decay, dt_bias: [value heads] float32; key_heads: divides value heads
    weight, inputs, slots, positions: as for convolve_rows, with SiLU
    matrices: [slots, value heads, value dim, key dim], float32 or bfloat16: S, changed in place as inputs are
    Returns [rows, value heads, value dim] in qkv's dtype; what empty rows get has no meaning.
    """
    return delta_rows_reference(qkv, a, b, weight, log_decay, dt_bias, inputs, matrices, slots, positions, key_heads)


def delta_rows_reference(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    weight: Tensor,
    log_decay: Tensor,
    dt_bias: Tensor,
    inputs: Tensor,
    matrices: Tensor,
    slots: Tensor,
    positions: Tensor,
    key_heads: int,
) -> Tensor:
    """delta_rows in torch."""
    convolved = convolve_rows_reference(qkv, weight, inputs, slots, positions, silu=True)
    q, k, v = (x.unsqueeze(-1) for x in split_heads(convolved, key_heads, *matrices.shape[1:3]))
    decays, strengths = (x[..., None, None] for x in gates(a, b, log_decay, dt_bias))
    states = matrices[slots.clamp(min=0).long()].float() * decays.exp()
    states = states + strengths * (v - states @ k) @ k.mT
    filled = slots >= 0
    matrices[slots[filled].long()] = states[filled].to(matrices.dtype)
    return (states @ q).squeeze(-1).to(qkv.dtype)
