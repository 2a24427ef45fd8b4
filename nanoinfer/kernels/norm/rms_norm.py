"""RMSNorm, alone or after the addition of a residual."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import early_launch, wait_for_predecessor


class Norm(NamedTuple):
    """An RMSNorm's parameters.

    weight: [size]
    plus_one: the weight is stored less one, as Gemma's checkpoints have it
    """

    weight: Tensor
    eps: float
    plus_one: bool = False


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, 2019).

    x: [tokens, size], weight: [size]; returns [tokens, size] in x's dtype.
    """
    return rms_norm_triton(x, weight, eps) if x.is_cuda else rms_norm_reference(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns (rms_norm(x + residual), x + residual), both [tokens, size].

    x: [tokens, size], or [pieces, tokens, size] float32 that add up to it; residual: [tokens, size]
    """
    if x.is_cuda:
        return add_rms_norm_triton(x, residual, weight, eps)
    return add_rms_norm_reference(x, residual, weight, eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm in torch: statistics in float32, rounded to x's dtype before the weight, as transformers does."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """add_rms_norm in torch."""
    if x.dim() == 3:
        x = x.sum(dim=0).to(residual.dtype)
    total = x + residual
    return rms_norm_reference(total, weight, eps), total


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm as one launch."""
    out = torch.empty_like(x)
    _launch(x, None, weight, out, None, eps)
    return out


def add_rms_norm_triton(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """add_rms_norm as one launch."""
    out, total = torch.empty_like(residual), torch.empty_like(residual)
    _launch(x, residual, weight, out, total, eps)
    return out, total


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, total: Tensor | None, eps: float) -> None:
    tokens, size = x.shape[-2:]
    block = triton.next_power_of_2(size)
    _rms_norm_kernel[(tokens,)](
        x,
        residual,
        weight,
        out,
        total,
        size,
        tokens * size,
        eps,
        PIECES=len(x) if x.dim() == 3 else 1,
        ADD=residual is not None,
        BLOCK=block,
        num_warps=norm_warps(block),
        **early_launch(x),
    )


def norm_warps(block: int) -> int:
    """For a program that norms one row."""
    return min(max(block // 256, 1), 16)


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    size,
    piece_stride,
    eps,
    PIECES: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * size
    offsets = tl.arange(0, BLOCK)
    mask = offsets < size
    weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0)
    wait_for_predecessor(EARLY)
    x = tl.load(x_ptr + row + offsets, mask=mask, other=0.0)
    for piece in tl.static_range(1, PIECES):
        x += tl.load(x_ptr + piece * piece_stride + row + offsets, mask=mask, other=0.0)
    x = x.to(out_ptr.dtype.element_ty)
    if ADD:
        x += tl.load(residual_ptr + row + offsets, mask=mask, other=0.0)
        tl.store(total_ptr + row + offsets, x, mask=mask)
    tl.store(out_ptr + row + offsets, norm_block(x, weight, size, eps), mask=mask)


@triton.jit
def norm_block(x, weight, size, eps):
    """rms_norm inside a kernel: of a row of `size` numbers, and zeros up to the next power of two."""
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    return (wide * scale).to(x.dtype) * weight
