"""Attention of one new token a sequence over the paged cache, split along the context when rows are few."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.paged_prefill import LOG2_E

MIN_KEYS_PER_SPLIT = 128
MAX_SPLITS = 64


def paged_decode_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    max_context_len: int,
    scale: float,
) -> Tensor:
    """Attend from each row's one query to the first `context_lens` tokens of its block table.

    q: [rows, heads, head_dim]; heads is a multiple of kv_heads
    k_cache, v_cache: [blocks, block_size, kv_heads, head_dim], the new tokens already written
    block_tables: [rows, max blocks] int32
    context_lens: [rows] int32, none above max_context_len; the output of a row with no context is not defined
    Returns [rows, heads, head_dim].
    """
    rows, heads, head_dim = q.shape
    _, block_size, kv_heads, _ = k_cache.shape
    blocks = block_tables[:, : math.ceil(max_context_len / block_size)]

    def gather(cache: Tensor) -> Tensor:  # [rows, kv_heads, max_context_len, head_dim]
        gathered = cache.index_select(0, blocks.flatten()).view(rows, -1, kv_heads, head_dim)
        return gathered[:, :max_context_len].transpose(1, 2)

    # The query heads of one KV head stand as its queries: no key is copied for them.
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, head_dim)
    mask = torch.arange(max_context_len, device=q.device) < context_lens[:, None].clamp(min=1)
    bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, float("-inf"))
    attended = F.scaled_dot_product_attention(
        grouped, gather(k_cache), gather(v_cache), bias[:, None, None], scale=scale
    )
    return attended.reshape(rows, heads, head_dim)


def paged_decode_triton(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    num_splits: int | None = None,
) -> Tensor:
    """paged_decode_reference as one launch, or two when the context is split.

    num_splits: how many programs share a row's context; None chooses enough to fill the device.
    """
    rows, heads, head_dim = q.shape
    _, block_size, kv_heads, _ = k_cache.shape
    if num_splits is None:
        num_splits = _choose_splits(rows * kv_heads, block_tables.shape[1] * block_size, q.device)
    out = torch.empty((rows, heads, head_dim), dtype=q.dtype, device=q.device)
    partial, lse = out, out  # one split writes the result itself, and no statistics
    if num_splits > 1:
        partial = torch.empty((rows, heads, num_splits, head_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty((rows, heads, num_splits), dtype=torch.float32, device=q.device)
    group = heads // kv_heads
    block_d = max(16, triton.next_power_of_2(head_dim))
    _paged_decode_kernel[(rows, kv_heads, num_splits)](
        q,
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        partial,
        lse,
        scale * LOG2_E,
        q.stride(0),
        block_tables.stride(0),
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        SPLITS=num_splits,
        BLOCK_G=max(16, triton.next_power_of_2(group)),
        BLOCK_N=math.gcd(block_size, 128 if num_splits < 16 else 64),
        BLOCK_D=block_d,
        num_warps=4,
        num_stages=2,
    )
    if num_splits > 1:
        _combine_splits_kernel[(rows, heads)](
            partial,
            lse,
            out,
            SPLITS=num_splits,
            HEAD_DIM=head_dim,
            BLOCK_S=triton.next_power_of_2(num_splits),
            BLOCK_D=block_d,
        )
    return out


def _choose_splits(programs: int, max_context_len: int, device: torch.device) -> int:
    """A power of two: each number of splits is a kernel to compile.

    Eight programs a multiprocessor were fastest on an H200 for rows of mixed lengths: the longest one ends last.
    """
    if device.type != "cuda":
        return 1
    wanted = 8 * torch.cuda.get_device_properties(device).multi_processor_count // programs
    most = max(1, min(wanted, max_context_len // MIN_KEYS_PER_SPLIT, MAX_SPLITS))
    return 1 << (most.bit_length() - 1)


@triton.jit
def _paged_decode_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    context_lens_ptr,
    out_ptr,
    lse_ptr,
    scale_log2,
    q_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    context_len = tl.load(context_lens_ptr + row)
    tiles = tl.cdiv(tl.cdiv(context_len, BLOCK_N), SPLITS)
    begin = split * tiles * BLOCK_N
    end = tl.minimum(begin + tiles * BLOCK_N, context_len)

    # One program serves all query heads of a KV head: each key is read once.
    g = tl.arange(0, BLOCK_G)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + g
    q_mask = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + row * q_stride + head[:, None] * HEAD_DIM + d[None, :], mask=q_mask, other=0.0)

    top = tl.full([BLOCK_G], -1e30, tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_N):
        # BLOCK_N divides BLOCK_SIZE: a tile of keys lies in one block.
        block = tl.load(block_tables_ptr + row * table_stride + start // BLOCK_SIZE).to(tl.int64)
        key = (block * BLOCK_SIZE + start % BLOCK_SIZE + n) * (KV_HEADS * HEAD_DIM)
        offsets = key[:, None] + kv_head * HEAD_DIM + d[None, :]
        kv_mask = (start + n < end)[:, None] & (d < HEAD_DIM)[None, :]
        k = tl.load(k_cache_ptr + offsets, mask=kv_mask, other=0.0)
        v = tl.load(v_cache_ptr + offsets, mask=kv_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where((start + n < end)[None, :], scores, -1e30)
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_top[:, None])
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.sum(weights, axis=1)
        acc = acc * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = new_top

    slot = (row * (KV_HEADS * GROUP) + head) * SPLITS + split
    acc = acc / tl.maximum(total, 1e-30)[:, None]
    target = out_ptr + slot[:, None] * HEAD_DIM + d[None, :]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=q_mask)
    if SPLITS > 1:
        lse = tl.where(total > 0, top + tl.log2(tl.maximum(total, 1e-30)), -1e30)
        tl.store(lse_ptr + slot, lse, mask=g < GROUP)


@triton.jit
def _combine_splits_kernel(
    partial_ptr,
    lse_ptr,
    out_ptr,
    SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    head = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    lse = tl.load(lse_ptr + head * SPLITS + s, mask=s < SPLITS, other=-1e30)
    weights = tl.exp2(lse - tl.max(lse, axis=0))
    mask = (s < SPLITS)[:, None] & (d < HEAD_DIM)[None, :]
    partial = tl.load(partial_ptr + (head * SPLITS + s)[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0)
    out = tl.sum(partial * weights[:, None], axis=0) / tl.sum(weights, axis=0)
    tl.store(out_ptr + head * HEAD_DIM + d, out.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)
