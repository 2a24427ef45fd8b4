"""Matrix products with what makes their input: at few rows one launch, bound by the reading of the weight.

With few rows a product's time is that of reading its weight, and a launch of its own for the norm or the activation
before it costs as much again. So each program makes the whole input row for itself, while its share of the weight is
on the way.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.activation import silu_mul
from nanoinfer.kernels.launch import early_launch, wait_for_predecessor
from nanoinfer.kernels.norm import add_rms_norm, rms_norm

FEW_ROWS = 4  # above, cuBLAS with separate launches is faster (measured on an H200)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T: [tokens, in_features] and [out_features, in_features] to [tokens, out_features]."""
    if x.is_cuda and len(x) <= FEW_ROWS:
        return few_rows_linear(x, weight)
    return F.linear(x, weight)


def silu_mul_linear(gate_up: Tensor, weight: Tensor) -> Tensor:
    """linear(silu_mul(gate_up), weight); gate_up: [tokens, 2 * in_features]."""
    if gate_up.is_cuda and len(gate_up) <= FEW_ROWS:
        return few_rows_silu_mul_linear(gate_up, weight)
    return F.linear(silu_mul(gate_up), weight)


def norm_linear(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns linear(rms_norm(x + residual), weight) and x + residual; x and residual: [tokens, in_features]."""
    if x.is_cuda and len(x) <= FEW_ROWS:
        return few_rows_norm_linear(x, residual, norm_weight, eps, weight)
    if residual is None:
        return F.linear(rms_norm(x, norm_weight, eps), weight), x
    normed, total = add_rms_norm(x, residual, norm_weight, eps)
    return F.linear(normed, weight), total


def few_rows_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Linear as one launch."""
    return _launch(x, weight)


def few_rows_silu_mul_linear(gate_up: Tensor, weight: Tensor) -> Tensor:
    """silu_mul_linear as one launch."""
    return _launch(gate_up, weight, silu_mul=True)


def few_rows_norm_linear(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """norm_linear as one launch."""
    total = x if residual is None else torch.empty_like(x)
    return _launch(x, weight, residual, total, norm_weight, eps), total


def _launch(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None = None,
    total: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    silu_mul: bool = False,
) -> Tensor:
    out_features, in_features = weight.shape
    assert x.is_contiguous()
    assert weight.is_contiguous()
    out = torch.empty((len(x), out_features), dtype=x.dtype, device=x.device)
    block_k = min(triton.next_power_of_2(in_features), 1024)
    block_n = 4 if out_features <= 4096 else 8
    _few_rows_kernel[(triton.cdiv(out_features, block_n),)](
        x,
        residual,
        norm_weight,
        weight,
        out,
        total,
        in_features,
        out_features,
        eps,
        ROWS=len(x),
        BLOCK_ROWS=triton.next_power_of_2(len(x)),
        NORM=norm_weight is not None,
        ADD=residual is not None,
        SILU_MUL=silu_mul,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=4,
        **early_launch(x),
    )
    return out


@triton.jit
def _few_rows_kernel(
    x_ptr,
    residual_ptr,
    norm_weight_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    in_features,
    out_features,
    eps,
    ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    SILU_MUL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
    k = tl.arange(0, BLOCK_K)
    rows = tl.arange(0, BLOCK_ROWS)[:, None]
    weights = weight_ptr + n * in_features + k[None, :]
    # No kernel writes weights: the first of them need not wait.
    weight = tl.load(weights, mask=(n < out_features) & (k < in_features)[None, :], other=0.0)
    wait_for_predecessor(EARLY)

    scale = tl.zeros([BLOCK_ROWS, 1], tl.float32)
    stored = tl.where(tl.program_id(0) == 0, in_features, 0)  # of x + residual: one program does it
    if NORM:
        for row in tl.static_range(ROWS):
            squares = tl.zeros([BLOCK_K], tl.float32)
            for start in range(0, in_features, BLOCK_K):
                x = _load_sum(x_ptr, residual_ptr, row * in_features, start + k, in_features, ADD)
                squares += x.to(tl.float32) * x.to(tl.float32)
                if ADD:
                    tl.store(total_ptr + row * in_features + start + k, x, mask=start + k < stored)
            row_scale = tl.rsqrt(tl.sum(squares, axis=0) / in_features + eps)
            scale = tl.where(rows == row, row_scale, scale)

    acc = tl.zeros([BLOCK_ROWS, BLOCK_N], tl.float32)
    for start in range(0, in_features, BLOCK_K):
        at = start + k
        wide = weight.to(tl.float32)
        following = (n < out_features) & (at + BLOCK_K < in_features)[None, :]
        weight = tl.load(weights + start + BLOCK_K, mask=following, other=0.0)
        for row in tl.static_range(ROWS):
            if SILU_MUL:
                gate = tl.load(x_ptr + row * 2 * in_features + at, mask=at < in_features, other=0.0)
                up = tl.load(x_ptr + (row * 2 + 1) * in_features + at, mask=at < in_features, other=0.0)
                gate = gate.to(tl.float32)
                x = (gate * tl.sigmoid(gate)).to(up.dtype) * up
            else:
                x = _load_sum(x_ptr, residual_ptr, row * in_features, at, in_features, ADD)
            if NORM:
                row_scale = tl.sum(tl.where(rows == row, scale, 0.0))
                norm_weight = tl.load(norm_weight_ptr + at, mask=at < in_features, other=0.0)
                x = (x.to(tl.float32) * row_scale).to(x.dtype) * norm_weight
            dots = tl.sum(wide * x.to(tl.float32)[None, :], axis=1)
            acc += tl.where(rows == row, dots[None, :], 0.0)
    out = out_ptr + rows * out_features + n.trans()
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(rows < ROWS) & (n < out_features).trans())


@triton.jit
def _load_sum(x_ptr, residual_ptr, offset, at, size, ADD: tl.constexpr):
    x = tl.load(x_ptr + offset + at, mask=at < size, other=0.0)
    if ADD:
        x += tl.load(residual_ptr + offset + at, mask=at < size, other=0.0)
    return x
