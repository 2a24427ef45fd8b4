"""q/k norm and rotary embedding in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.norm import rms_norm_reference

HEADS_PER_PROGRAM = 8


def qk_norm_rotary(
    qk: Tensor,
    num_q_heads: int,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    eps: float,
) -> Tensor:
    """RMSNorm each query and key head, then rotate its halves by its token's angles (Su et al., 2021).

    qk: [tokens, heads, head_dim], the query heads before the key heads; tokens may be strided
    q_weight, k_weight: [head_dim]
    cos_sin: [positions, head_dim] float32, the cosines in the first half and the sines in the second
    positions: [tokens] int32, rows of cos_sin; -1 (a padding token) counts as 0
    Returns a packed tensor of qk's shape.
    """
    function = qk_norm_rotary_triton if qk.is_cuda else qk_norm_rotary_reference
    return function(qk, num_q_heads, q_weight, k_weight, cos_sin, positions, eps)


def qk_norm_rotary_reference(
    qk: Tensor,
    num_q_heads: int,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    eps: float,
) -> Tensor:
    """qk_norm_rotary in torch."""
    q, k = qk[:, :num_q_heads], qk[:, num_q_heads:]
    normed = torch.cat([rms_norm_reference(q, q_weight, eps), rms_norm_reference(k, k_weight, eps)], dim=1)
    cos, sin = cos_sin[positions.clamp(min=0)].unsqueeze(1).chunk(2, dim=-1)
    first, second = normed.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(qk.dtype)


def qk_norm_rotary_triton(
    qk: Tensor,
    num_q_heads: int,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    eps: float,
) -> Tensor:
    """qk_norm_rotary as one launch."""
    tokens, heads, head_dim = qk.shape
    assert qk.stride()[1:] == (head_dim, 1)
    out = torch.empty((tokens, heads, head_dim), dtype=qk.dtype, device=qk.device)
    _qk_norm_rotary_kernel[(tokens, triton.cdiv(heads, HEADS_PER_PROGRAM))](
        qk,
        q_weight,
        k_weight,
        cos_sin,
        positions,
        out,
        qk.stride(0),
        heads,
        num_q_heads,
        eps,
        HALF=head_dim // 2,
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        BLOCK_HEADS=HEADS_PER_PROGRAM,
        num_warps=2,
    )
    return out


@triton.jit
def _qk_norm_rotary_kernel(
    qk_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_sin_ptr,
    positions_ptr,
    out_ptr,
    token_stride,
    heads,
    num_q_heads,
    eps,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    i = tl.arange(0, BLOCK_HALF)[None, :]
    lane = i < HALF
    mask = (head < heads) & lane

    source = qk_ptr + token * token_stride + head * (2 * HALF) + i
    first = tl.load(source, mask=mask, other=0.0)
    second = tl.load(source + HALF, mask=mask, other=0.0)
    wide1, wide2 = first.to(tl.float32), second.to(tl.float32)
    mean = tl.sum(wide1 * wide1 + wide2 * wide2, axis=1) / (2 * HALF)
    scale = tl.rsqrt(mean + eps)[:, None]

    is_q = head < num_q_heads
    weight1 = tl.where(is_q, tl.load(q_weight_ptr + i, mask=lane), tl.load(k_weight_ptr + i, mask=lane))
    weight2 = tl.where(is_q, tl.load(q_weight_ptr + HALF + i, mask=lane), tl.load(k_weight_ptr + HALF + i, mask=lane))
    normed1 = ((wide1 * scale).to(first.dtype) * weight1).to(tl.float32)
    normed2 = ((wide2 * scale).to(first.dtype) * weight2).to(tl.float32)

    position = tl.maximum(tl.load(positions_ptr + token), 0)
    cos = tl.load(cos_sin_ptr + position * (2 * HALF) + i, mask=lane, other=0.0)
    sin = tl.load(cos_sin_ptr + position * (2 * HALF) + HALF + i, mask=lane, other=0.0)
    target = out_ptr + token * heads * (2 * HALF) + head * (2 * HALF) + i
    tl.store(target, (normed1 * cos - normed2 * sin).to(first.dtype), mask=mask)
    tl.store(target + HALF, (normed2 * cos + normed1 * sin).to(first.dtype), mask=mask)
