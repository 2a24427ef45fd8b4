"""RMSNorm of each head, times SiLU of a gate, which comes behind the norm or before it; or the gate alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import cdiv, launch_options, next_power_of_2, wait_for_predecessor

BLOCK = 2048  # numbers of a program


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    gates_first: bool = False,
    mean_squares: Tensor | None = None,
) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight * silu(gate), the mean over a head, [tokens, heads * dim] in x's dtype.

    x: [tokens, heads, dim]; gate: [tokens, heads * dim], may be some columns of a wider matrix
    weight: [dim], or [heads * dim], whose heads have their own; None: there is no norm, but the gate alone
    gates_first: the norm is that of x * silu(gate)
    mean_squares: [tokens, heads] float32, of what is normalised; given if a head's other numbers are on other ranks
    """
    function = gated_norm_triton if x.is_cuda else gated_norm_reference
    return function(x, gate, weight, eps, gates_first, mean_squares)


def gated_norm_reference(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    gates_first: bool = False,
    mean_squares: Tensor | None = None,
) -> Tensor:
    """gated_norm in torch; as transformers' Qwen3_5RMSNormGated it rounds to x's dtype before the weight multiplies."""
    wide, gates = x.float(), F.silu(gate.float())
    if weight is None:
        return (wide.flatten(1) * gates).to(x.dtype)
    if gates_first:
        wide = wide * gates.view(x.shape)
    if mean_squares is None:
        normed = F.rms_norm(wide, x.shape[-1:], eps=eps)
    else:
        normed = wide * (mean_squares + eps).rsqrt().unsqueeze(-1)
    normed = normed.to(x.dtype) * weight.view(-1, x.shape[-1])
    return normed.flatten(1) if gates_first else (normed.flatten(1) * gates).to(x.dtype)


def gated_norm_triton(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    gates_first: bool = False,
    mean_squares: Tensor | None = None,
) -> Tensor:
    """gated_norm as one launch."""
    tokens, heads, dim = x.shape
    out = torch.empty((tokens, heads * dim), dtype=x.dtype, device=x.device)
    block_h, block_d = _blocks(dim)
    _gated_norm_kernel[(tokens, cdiv(heads, block_h))](
        x,
        gate,
        weight,
        mean_squares,
        out,
        gate.stride(0),
        0 if mean_squares is None else mean_squares.stride(0),
        eps,
        HEADS=heads,
        DIM=dim,
        OWN_WEIGHTS=weight is not None and len(weight) > dim,
        GATES_FIRST=gates_first,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        **launch_options(x),
    )
    return out


def part_of_mean_squares(x: Tensor, gate: Tensor | None, size: int) -> Tensor:
    """Return what x adds to the mean squares of heads of `size` numbers, of which it has some: [tokens, heads] float32.

    x, gate: as for gated_norm; what is normalised is x * silu(gate), or without a gate x
    """
    return (part_of_mean_squares_triton if x.is_cuda else part_of_mean_squares_reference)(x, gate, size)


def part_of_mean_squares_reference(x: Tensor, gate: Tensor | None, size: int) -> Tensor:
    """part_of_mean_squares in torch."""
    wide = x.float() if gate is None else x.float() * F.silu(gate.float()).view(x.shape)
    return wide.square().sum(dim=-1) / size


def part_of_mean_squares_triton(x: Tensor, gate: Tensor | None, size: int) -> Tensor:
    """part_of_mean_squares as one launch."""
    tokens, heads, dim = x.shape
    out = torch.empty((tokens, heads), dtype=torch.float32, device=x.device)
    block_h, block_d = _blocks(dim)
    _mean_squares_kernel[(tokens, cdiv(heads, block_h))](
        x,
        gate,
        out,
        0 if gate is None else gate.stride(0),
        size,
        HEADS=heads,
        DIM=dim,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        **launch_options(x),
    )
    return out


def _blocks(dim: int) -> tuple[int, int]:
    """Return how many heads a program has, and numbers of each. A rank's few heads have as many, for their bits."""
    block_d = next_power_of_2(dim)
    return max(1, BLOCK // block_d), block_d


@triton.jit
def _gated_norm_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    squares_ptr,
    out_ptr,
    gate_stride,
    squares_stride,
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
    elif weight_ptr is not None:
        weight = tl.load(weight_ptr + d, mask=d < DIM, other=0.0)
    wait_for_predecessor(EARLY)
    x = tl.load(x_ptr + token * (HEADS * DIM) + at, mask=mask, other=0.0)
    gate = tl.load(gate_ptr + token * gate_stride + at, mask=mask, other=0.0).to(tl.float32)
    wide, gate = x.to(tl.float32), gate * tl.sigmoid(gate)
    if weight_ptr is None:
        out = (wide * gate).to(x.dtype)
    else:
        if GATES_FIRST:
            wide *= gate
        if squares_ptr is None:
            squares = tl.sum(wide * wide, axis=1) / DIM
        else:
            squares = tl.load(squares_ptr + token * squares_stride + head, mask=head < HEADS, other=0.0)
        normed = wide * tl.rsqrt(squares + eps)[:, None]
        out = normed.to(x.dtype) * weight
        if not GATES_FIRST:
            out = (out.to(tl.float32) * gate).to(x.dtype)
    tl.store(out_ptr + token * (HEADS * DIM) + at, out, mask=mask)


@triton.jit
def _mean_squares_kernel(
    x_ptr,
    gate_ptr,
    out_ptr,
    gate_stride,
    size,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY)
    token = tl.program_id(0).to(tl.int64)
    head, d = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    at = head[:, None] * DIM + d
    mask = (head < HEADS)[:, None] & (d < DIM)
    wide = tl.load(x_ptr + token * (HEADS * DIM) + at, mask=mask, other=0.0).to(tl.float32)
    if gate_ptr is not None:
        gate = tl.load(gate_ptr + token * gate_stride + at, mask=mask, other=0.0).to(tl.float32)
        wide *= gate * tl.sigmoid(gate)
    tl.store(out_ptr + token * HEADS + head, tl.sum(wide * wide, axis=1) / size, mask=head < HEADS)
