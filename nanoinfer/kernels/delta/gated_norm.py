"""RMSNorm of each head, times SiLU of a gate, which comes behind the norm or before it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import cdiv, launch_options, next_power_of_2, wait_for_predecessor

BLOCK = 2048  # numbers of a program


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, gates_first: bool = False) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight * silu(gate), the mean over a head, [tokens, heads * dim] in x's dtype.

    x: [tokens, heads, dim]; gate: [tokens, heads * dim], may be some columns of a wider matrix
    weight: [dim], or [heads * dim], whose heads have their own
    gates_first: the norm is that of x * silu(gate)
    """
    function = gated_norm_triton if x.is_cuda else gated_norm_reference
    return function(x, gate, weight, eps, gates_first)


def gated_norm_reference(x: Tensor, gate: Tensor, weight: Tensor, eps: float, gates_first: bool = False) -> Tensor:
    """gated_norm in torch; as transformers' Qwen3_5RMSNormGated it rounds to x's dtype before the weight multiplies."""
    wide, gates = x.float(), F.silu(gate.float())
    if gates_first:
        wide = wide * gates.view(x.shape)
    normed = F.rms_norm(wide, x.shape[-1:], eps=eps).to(x.dtype) * weight.view(-1, x.shape[-1])
    return normed.flatten(1) if gates_first else (normed.flatten(1) * gates).to(x.dtype)


def gated_norm_triton(x: Tensor, gate: Tensor, weight: Tensor, eps: float, gates_first: bool = False) -> Tensor:
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
        OWN_WEIGHTS=len(weight) > dim,
        GATES_FIRST=gates_first,
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
    OWN_WEIGHTS: tl.constexpr,
    GATES_FIRST: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head, d = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    at = head[:, None] * DIM + d
    mask = (head < HEADS)[:, None] & (d < DIM)
    if OWN_WEIGHTS:
        weight = tl.load(weight_ptr + at, mask=mask, other=0.0)
    else:
        weight = tl.load(weight_ptr + d, mask=d < DIM, other=0.0)
    wait_for_predecessor(EARLY)
    x = tl.load(x_ptr + token * (HEADS * DIM) + at, mask=mask, other=0.0)
    gate = tl.load(gate_ptr + token * gate_stride + at, mask=mask, other=0.0).to(tl.float32)
    wide, gate = x.to(tl.float32), gate * tl.sigmoid(gate)
    if GATES_FIRST:
        wide *= gate
    normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=1) / DIM + eps)[:, None]
    out = normed.to(x.dtype) * weight
    if not GATES_FIRST:
        out = (out.to(tl.float32) * gate).to(x.dtype)
    tl.store(out_ptr + token * (HEADS * DIM) + at, out, mask=mask)
