"""Causal attention of packed queries over the paged cache, with the same bits for chunks of any length."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.attention.in_order.chunk import CHUNK, attend_to_chunk, before_keys, join, result, tile_of
from nanoinfer.kernels.attention.scores import in_log2, load_slopes
from nanoinfer.kernels.fp8 import FP8
from nanoinfer.kernels.launch import cdiv, next_power_of_2


def prefill_in_order(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    cu_query_lens: Tensor,
    context_lens: Tensor,
    max_query_len: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    kv_scales: Tensor | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """Attend as paged_prefill_triton does."""
    assert k_cache.stride() == v_cache.stride()
    (tokens, heads, head_dim), value_dim = q.shape, v_cache.shape[3]
    _, block_size, kv_heads, _ = k_cache.shape
    out = torch.empty((tokens, heads, value_dim), dtype=q.dtype, device=q.device)
    factor, cap = in_log2(scale, softcap)
    queries, warps = (32, 8) if head_dim > 256 else (64, 4)  # of a program: as many as its registers have room for
    _prefill_kernel[(heads, cdiv(max_query_len, queries), len(context_lens))](
        q,
        k_cache,
        v_cache,
        block_tables,
        cu_query_lens,
        context_lens,
        out,
        kv_scales,
        sinks,
        slopes,
        factor,
        q.stride(0),
        block_tables.stride(0),
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        STRIDE=k_cache.stride(2),
        BLOCK_SIZE=block_size,
        WINDOW=window or 0,
        CAP=cap,
        SINKS=sinks is not None,
        IN_FP8=k_cache.dtype == FP8,
        CHUNK=CHUNK,
        TILE=tile_of(k_cache),
        BLOCK_M=queries,
        BLOCK_D=max(16, next_power_of_2(head_dim)),
        BLOCK_V=max(16, next_power_of_2(value_dim)),
        num_warps=warps,
        num_stages=3,
        enable_fp_fusion=False,
    )
    return out


@triton.jit
def _prefill_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    cu_query_lens_ptr,
    context_lens_ptr,
    out_ptr,
    kv_scales_ptr,
    sinks_ptr,
    slopes_ptr,
    factor,
    q_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    SINKS: tl.constexpr,
    IN_FP8: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    # The programs with the most keys come first. The heads that share a KV head run side by side.
    head, tile, seq = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1), tl.program_id(2)
    begin = tl.load(cu_query_lens_ptr + seq)
    query_len = tl.load(cu_query_lens_ptr + seq + 1) - begin
    context_len = tl.load(context_lens_ptr + seq)
    if tile * BLOCK_M < query_len:
        m, d, v_d = tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
        q_mask = (m < query_len)[:, None] & (d < HEAD_DIM)[None, :]
        token = (begin + m).to(tl.int64)[:, None]
        q = tl.load(q_ptr + token * q_stride + head * HEAD_DIM + d[None, :], mask=q_mask, other=0.0)
        table = block_tables_ptr + seq * table_stride
        first_position = context_len - query_len + tile * BLOCK_M
        position = context_len - query_len + m
        first_key = tl.maximum(first_position + 1 - WINDOW, 0) if WINDOW > 0 else 0
        end = tl.minimum(context_len, first_position + BLOCK_M)
        if IN_FP8:
            factor *= tl.load(kv_scales_ptr)
        top, total = before_keys(sinks_ptr, head, True, SINKS, BLOCK_M)
        slopes = None
        if slopes_ptr is not None:
            slopes = tl.zeros([BLOCK_M], tl.float32) + load_slopes(slopes_ptr, head, True)
        acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        for chunk in range(first_key // CHUNK * CHUNK, end, CHUNK):
            more = attend_to_chunk(
                q,
                position,
                tl.maximum(chunk, first_key // TILE * TILE),
                tl.minimum(chunk + CHUNK, end),
                context_len,
                first_key,
                table,
                k_cache_ptr,
                v_cache_ptr,
                head // GROUP,
                factor,
                slopes,
                KV_HEADS,
                HEAD_DIM,
                VALUE_DIM,
                STRIDE,
                BLOCK_SIZE,
                WINDOW,
                CAP,
                TILE,
                BLOCK_M,
                BLOCK_D,
                BLOCK_V,
            )
            acc, top, total = join(acc, top, total, more[0], more[1], more[2])
        if IN_FP8:
            acc *= tl.load(kv_scales_ptr + 1)
        out = out_ptr + token * (KV_HEADS * GROUP * VALUE_DIM) + head * VALUE_DIM + v_d[None, :]
        out_mask = (m < query_len)[:, None] & (v_d < VALUE_DIM)[None, :]
        tl.store(out, result(acc, total).to(out_ptr.dtype.element_ty), mask=out_mask)
