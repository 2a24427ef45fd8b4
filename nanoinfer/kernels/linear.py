"""Matrix products with what makes their input: for a single row one launch, as fast as the weight can be read.

A launch of its own for the norm or the activation before a single row's product costs as much as a small product. So
each program makes the whole input row for itself, while the first of its share of the weight is on the way.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.activation import silu_mul
from nanoinfer.kernels.launch import early_launch, num_multiprocessors, wait_for_predecessor
from nanoinfer.kernels.norm import add_rms_norm, rms_norm

MAX_IN_FEATURES = 16384  # what one program's registers hold of the input, beside two tiles of the weight
MIN_TILE = 8192  # weights that a program loads at once; two rows of it at least, or the reductions cost more
WEIGHTS_PER_SM = 4 * MIN_TILE  # on their way at a time


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T: [tokens, in_features] and [out_features, in_features] to [tokens, out_features]."""
    if _is_one_row(x, weight):
        return one_row_linear(x, weight)
    return F.linear(x, weight)


def silu_mul_linear(gate_up: Tensor, weight: Tensor) -> Tensor:
    """linear(silu_mul(gate_up), weight); gate_up: [tokens, 2 * in_features]."""
    if _is_one_row(gate_up, weight):
        return one_row_silu_mul_linear(gate_up, weight)
    return F.linear(silu_mul(gate_up), weight)


def norm_linear(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns linear(rms_norm(x + residual), weight) and x + residual; x and residual: [tokens, in_features]."""
    if _is_one_row(x, weight):
        return one_row_norm_linear(x, residual, norm_weight, eps, weight)
    if residual is None:
        return F.linear(rms_norm(x, norm_weight, eps), weight), x
    normed, total = add_rms_norm(x, residual, norm_weight, eps)
    return F.linear(normed, weight), total


def _is_one_row(x: Tensor, weight: Tensor) -> bool:
    return x.is_cuda and len(x) == 1 and weight.shape[1] <= MAX_IN_FEATURES


def one_row_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Linear of one row as one launch."""
    return _launch(x, weight)


def one_row_silu_mul_linear(gate_up: Tensor, weight: Tensor) -> Tensor:
    """silu_mul_linear of one row as one launch."""
    return _launch(gate_up, weight, gated=True)


def one_row_norm_linear(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """norm_linear of one row as one launch."""
    total = x if residual is None else torch.empty_like(x)
    return _launch(x, weight, residual, total, norm_weight, eps), total


def _launch(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None = None,
    total: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
) -> Tensor:
    out_features, in_features = weight.shape
    assert x.is_contiguous()
    assert weight.is_contiguous()
    out = torch.empty((1, out_features), dtype=x.dtype, device=x.device)
    block_k = triton.next_power_of_2(in_features)
    tile = max(MIN_TILE, 2 * block_k)
    block_n = tile // block_k
    programs = max(WEIGHTS_PER_SM // tile, 1) * num_multiprocessors(x.device)
    _one_row_kernel[(min(triton.cdiv(out_features, block_n), programs),)](
        x,
        residual,
        norm_weight,
        weight,
        out,
        total,
        in_features,
        out_features,
        eps,
        NORM=norm_weight is not None,
        ADD=residual is not None,
        SILU_MUL=gated,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=8 if tile == MIN_TILE else 16,
        **early_launch(x),
    )
    return out


@triton.jit
def _one_row_kernel(
    x_ptr,
    residual_ptr,
    norm_weight_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    in_features,
    out_features,
    eps,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    SILU_MUL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    k = tl.arange(0, BLOCK_K)
    inside = k < in_features
    # Weights were written long before: the first of them need not wait.
    tile = _load_tile(weight_ptr, program, k, in_features, out_features, BLOCK_N)
    if NORM:
        norm_weight = tl.load(norm_weight_ptr + k, mask=inside, other=0.0)
    wait_for_predecessor(EARLY)

    x = tl.load(x_ptr + k, mask=inside, other=0.0)
    if SILU_MUL:
        gate = x.to(tl.float32)
        up = tl.load(x_ptr + in_features + k, mask=inside, other=0.0)
        x = (gate * tl.sigmoid(gate)).to(up.dtype) * up
    if ADD:
        x += tl.load(residual_ptr + k, mask=inside, other=0.0)
        tl.store(total_ptr + k, x, mask=k < tl.where(program == 0, in_features, 0))
    wide = x.to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / in_features + eps)
        wide = ((wide * scale).to(x.dtype) * norm_weight).to(tl.float32)

    n = tl.arange(0, BLOCK_N)
    for start in range(program * BLOCK_N, out_features, programs * BLOCK_N):
        following = _load_tile(weight_ptr, start // BLOCK_N + programs, k, in_features, out_features, BLOCK_N)
        dots = tl.sum(tile.to(tl.float32) * wide[None, :], axis=1)
        tl.store(out_ptr + start + n, dots.to(out_ptr.dtype.element_ty), mask=start + n < out_features)
        tile = following


@triton.jit
def _load_tile(weight_ptr, tile, k, in_features, out_features, BLOCK_N: tl.constexpr):
    n = tile.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (n < out_features)[:, None] & (k < in_features)[None, :]
    return tl.load(weight_ptr + n[:, None] * in_features + k[None, :], mask=mask, other=0.0)
