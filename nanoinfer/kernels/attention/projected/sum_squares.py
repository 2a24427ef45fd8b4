"""Sums of squares of queries and keys, for norms that go over all heads of a token, of which a rank has some."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import launch_options, next_power_of_2, wait_for_predecessor
from nanoinfer.kernels.norm.norm import norm_warps


def sum_squares(qkv: Tensor, heads: int, kv_heads: int) -> Tensor:
    """Return [tokens, 2] float32, the sums of squares of each token's query heads and of its key heads.

    qkv: [tokens, heads + 2 * kv_heads, head_dim]. All ranks' sums, added and divided by the counts, are mean_squares.
    """
    return (sum_squares_triton if qkv.is_cuda else sum_squares_reference)(qkv, heads, kv_heads)


def sum_squares_reference(qkv: Tensor, heads: int, kv_heads: int) -> Tensor:
    """sum_squares in torch."""
    squares = qkv.float().square().sum(dim=-1)
    return torch.stack([squares[:, :heads].sum(dim=1), squares[:, heads : heads + kv_heads].sum(dim=1)], dim=1)


def sum_squares_triton(qkv: Tensor, heads: int, kv_heads: int) -> Tensor:
    """sum_squares as one launch."""
    tokens, all_heads, head_dim = qkv.shape
    assert qkv.is_contiguous()
    assert all_heads == heads + 2 * kv_heads
    sums = torch.empty((tokens, 2), dtype=torch.float32, device=qkv.device)
    block = next_power_of_2(max(heads, kv_heads) * head_dim)
    _sum_squares_kernel[(tokens, 2)](
        qkv,
        sums,
        heads * head_dim,
        kv_heads * head_dim,
        BLOCK=block,
        num_warps=norm_warps(block),
        **launch_options(qkv),
    )
    return sums


@triton.jit
def _sum_squares_kernel(qkv_ptr, sums_ptr, q_size, kv_size, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    wait_for_predecessor(EARLY)
    token, of_keys = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < tl.where(of_keys == 0, q_size, kv_size)
    source = qkv_ptr + token * (q_size + 2 * kv_size) + of_keys * q_size
    wide = tl.load(source + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(sums_ptr + 2 * token + of_keys, tl.sum(wide * wide, axis=0))
