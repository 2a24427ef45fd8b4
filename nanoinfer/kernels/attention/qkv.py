"""From the q/k/v projection to attention in one pass: q/k norm, rotary embedding, keys and values to the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import early_launch, wait_for_predecessor
from nanoinfer.kernels.norm.rms_norm import rms_norm_reference

HEADS_PER_PROGRAM = 8


def norm_rotate_store(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """RMSNorm each query and key head, rotate its halves by its token's angles, and write keys and values to the cache.

    qkv: [tokens, heads + 2 * kv_heads, head_dim], the query heads first and the value heads last
    q_weight, k_weight: [head_dim]
    cos_sin: [positions, head_dim] float32, the cosines in the first half and the sines in the second
    positions: [tokens] int32, rows of cos_sin; -1 (a padding token) counts as 0
    k_cache, v_cache: [blocks, block_size, kv_heads, head_dim]; slot s is row s % block_size of block s // block_size
    slot_mapping: [tokens] int32; the keys and values of a token whose slot is -1 are written nowhere
    Returns the queries, [tokens, heads, head_dim]. The rotation is that of Su et al., 2021.
    """
    function = norm_rotate_store_triton if qkv.is_cuda else norm_rotate_store_reference
    return function(qkv, q_weight, k_weight, eps, cos_sin, positions, k_cache, v_cache, slot_mapping)


def norm_rotate_store_reference(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """norm_rotate_store in torch."""
    kv_heads = k_cache.shape[2]
    q, k, v = qkv.split([qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    cos, sin = cos_sin[positions.clamp(min=0)].unsqueeze(1).chunk(2, dim=-1)

    def norm_rotate(x: Tensor, weight: Tensor) -> Tensor:
        first, second = rms_norm_reference(x, weight, eps).float().chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)

    written = slot_mapping >= 0
    slots = slot_mapping[written]
    k_cache.flatten(0, 1)[slots] = norm_rotate(k, k_weight)[written]
    v_cache.flatten(0, 1)[slots] = v[written]
    return norm_rotate(q, q_weight)


def norm_rotate_store_triton(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """norm_rotate_store as one launch."""
    (tokens, all_heads, head_dim), kv_heads = qkv.shape, k_cache.shape[2]
    assert qkv.is_contiguous()
    q = torch.empty((tokens, all_heads - 2 * kv_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    _norm_rotate_store_kernel[(tokens, triton.cdiv(all_heads, HEADS_PER_PROGRAM))](
        qkv,
        q_weight,
        k_weight,
        eps,
        cos_sin,
        positions,
        k_cache,
        v_cache,
        slot_mapping,
        q,
        HEADS=all_heads - 2 * kv_heads,
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        BLOCK_HEADS=HEADS_PER_PROGRAM,
        num_warps=2,
        **early_launch(qkv),
    )
    return q


@triton.jit
def _norm_rotate_store_kernel(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    cos_sin_ptr,
    positions_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_mapping_ptr,
    q_ptr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    EARLY: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    i = tl.arange(0, BLOCK_HALF)[None, :]
    lane = i < HALF
    is_q = head < HEADS
    is_k = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_v = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    q_weight1, q_weight2 = _load_halves(q_weight_ptr + i, HALF, lane)
    k_weight1, k_weight2 = _load_halves(k_weight_ptr + i, HALF, lane)
    wait_for_predecessor(EARLY)

    source = qkv_ptr + (token * (HEADS + 2 * KV_HEADS) + head) * (2 * HALF) + i
    first, second = _load_halves(source, HALF, (is_q | is_k | is_v) & lane)
    wide1, wide2 = first.to(tl.float32), second.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide1 * wide1 + wide2 * wide2, axis=1) / (2 * HALF) + eps)[:, None]
    normed1 = ((wide1 * scale).to(first.dtype) * tl.where(is_q, q_weight1, k_weight1)).to(tl.float32)
    normed2 = ((wide2 * scale).to(first.dtype) * tl.where(is_q, q_weight2, k_weight2)).to(tl.float32)
    position = tl.maximum(tl.load(positions_ptr + token), 0)
    cos, sin = _load_halves(cos_sin_ptr + position * (2 * HALF) + i, HALF, lane)
    rotated1 = (normed1 * cos - normed2 * sin).to(first.dtype)
    rotated2 = (normed2 * cos + normed1 * sin).to(first.dtype)

    q_target = q_ptr + (token * HEADS + head) * (2 * HALF) + i
    _store_halves(q_target, rotated1, rotated2, HALF, is_q & lane)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)  # a cache may have more than 2^31 elements
    if slot >= 0:
        row = slot * KV_HEADS + head - HEADS
        _store_halves(k_cache_ptr + row * (2 * HALF) + i, rotated1, rotated2, HALF, is_k & lane)
        _store_halves(v_cache_ptr + (row - KV_HEADS) * (2 * HALF) + i, first, second, HALF, is_v & lane)


@triton.jit
def _load_halves(ptr, HALF: tl.constexpr, mask):
    return tl.load(ptr, mask=mask, other=0.0), tl.load(ptr + HALF, mask=mask, other=0.0)


@triton.jit
def _store_halves(ptr, first, second, HALF: tl.constexpr, mask):
    tl.store(ptr, first, mask=mask)
    tl.store(ptr + HALF, second, mask=mask)
