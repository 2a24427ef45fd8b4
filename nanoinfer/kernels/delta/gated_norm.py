"""RMSNorm of each head, times SiLU of a gate."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import cdiv, launch_options, next_power_of_2, wait_for_predecessor

BLOCK = 2048  # numbers of a program


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight * silu(gate), the mean over a head, [tokens, heads * dim] in x's dtype.

    x: [tokens, heads, dim]; gate: [tokens, heads * dim], may be some columns of a wider matrix; weight: [dim]
    """
    function = gated_norm_triton if x.is_cuda else gated_norm_reference
    return function(x, gate, weight, eps)


def gated_norm_reference(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """gated_norm in torch; as transformers' Qwen3_5RMSNormGated it rounds to x's dtype before the weight multiplies."""
    normed = F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype) * weight
    return (normed.flatten(1) * F.silu(gate.float())).to(x.dtype)


def gated_norm_triton(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """gated_norm as one launch."""
    tokens, heads, dim = x.shape
    out = torch.empty((tokens, heads * dim), dtype=x.dtype, device=x.device)
    block_d = next_power_of_2(dim)
    block_h = max(1, min(next_power_of_2(heads), BLOCK // block_d))
    _gated_norm_kernel[(tokens, cdiv(heads, block_h))](
        x,
        gate,
        weight,
        out,
        gate.stride(0),
        eps,
        HEADS=heads,
        DIM=dim,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        **launch_options(x),
    )
    return out


@triton.jit
def _gated_norm_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    gate_stride,
    eps,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head, d = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    at = head[:, None] * DIM + d
    mask = (head < HEADS)[:, None] & (d < DIM)
    weight = tl.load(weight_ptr + d, mask=d < DIM, other=0.0)
    wait_for_predecessor(EARLY)
    x = tl.load(x_ptr + token * (HEADS * DIM) + at, mask=mask, other=0.0)
    gate = tl.load(gate_ptr + token * gate_stride + at, mask=mask, other=0.0).to(tl.float32)
    wide = x.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=1) / DIM + eps)[:, None]
    scaled = normed.to(x.dtype) * weight
    out = scaled.to(tl.float32) * (gate * tl.sigmoid(gate))
    tl.store(out_ptr + token * (HEADS * DIM) + at, out.to(x.dtype), mask=mask)
