"""Attention of one new token per sequence over the paged cache, with the bits that a prompt's token has."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.attention.decode.decode_plan import DecodePlan, Programs
from nanoinfer.kernels.attention.in_order.chunk import (
    CHUNK,
    UNSEEN,
    attend_to_chunk,
    before_keys,
    join,
    result,
    tile_of,
)
from nanoinfer.kernels.attention.scores import in_log2, load_slopes
from nanoinfer.kernels.fp8 import FP8
from nanoinfer.kernels.launch import cdiv, launch_options, load_complete, next_power_of_2, wait_for_predecessor

COMBINED_AT_ONCE = tl.constexpr(4)  # chunks' results that a program loads at once


def decode_programs(head_dim: int) -> Programs:
    """Return how decode_in_order runs; for the results of large heads four warps would lack registers."""
    return Programs(tile=CHUNK, stages=5, warps=8 if head_dim > 256 else 4, per_multiprocessor=2)


def decode_in_order(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    max_context_len: int,
    scale: float,
    plan: DecodePlan,
    softcap: float | None = None,
    kv_scales: Tensor | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """Attend as paged_decode_reference does, with the plan's window, in one launch.

    plan: from plan_decode of the same context_lens, for decode_programs
    """
    assert k_cache.stride() == v_cache.stride()
    (rows, heads, head_dim), value_dim = q.shape, v_cache.shape[3]
    _, block_size, kv_heads, _ = k_cache.shape
    group, workers = heads // kv_heads, plan.shares.shape[0]
    factor, cap = in_log2(scale, softcap)
    out = torch.empty((rows, heads, value_dim), dtype=q.dtype, device=q.device)
    # The chunks' results of rows that several workers share: a worker begins at most one of these.
    longest = max_context_len if plan.window is None else min(plan.window + CHUNK, max_context_len)
    places = kv_heads, min(rows, workers), cdiv(longest, CHUNK), group
    partial = torch.empty((*places, value_dim), dtype=torch.float32, device=q.device)
    sums = torch.empty((*places, 2), dtype=torch.float32, device=q.device)
    _decode_kernel[(workers, kv_heads)](
        q,
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        plan.shares,
        plan.share_tiles,
        plan.arrivals,
        partial,
        sums,
        out,
        kv_scales,
        sinks,
        slopes,
        factor,
        q.stride(0),
        block_tables.stride(0),
        places[1],
        places[2],
        BY_ROW=rows <= workers,
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        STRIDE=k_cache.stride(2),
        BLOCK_SIZE=block_size,
        WINDOW=plan.window or 0,
        CAP=cap,
        SINKS=sinks is not None,
        IN_FP8=k_cache.dtype == FP8,
        CHUNK=CHUNK,
        TILE=tile_of(k_cache),
        BLOCK_G=max(16, next_power_of_2(group)),
        BLOCK_D=max(16, next_power_of_2(head_dim)),
        BLOCK_V=max(16, next_power_of_2(value_dim)),
        num_warps=plan.programs.warps,
        num_stages=plan.programs.stages,
        **launch_options(q, fused=False),
    )
    return out


@triton.jit
def _decode_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    context_lens_ptr,
    shares_ptr,
    share_chunks_ptr,
    arrivals_ptr,
    partial_ptr,
    sums_ptr,
    out_ptr,
    kv_scales_ptr,
    sinks_ptr,
    slopes_ptr,
    factor,
    q_stride,
    table_stride,
    places,
    most_chunks,
    BY_ROW: tl.constexpr,
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
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    EARLY: tl.constexpr,
):
    worker, kv_head = tl.program_id(0), tl.program_id(1)
    # The predecessor writes queries, keys and values; the plan and the lengths are older.
    first_row, last_row = load_complete(shares_ptr + worker * 4), load_complete(shares_ptr + worker * 4 + 1)
    chunk, num_chunks = load_complete(shares_ptr + worker * 4 + 2), load_complete(shares_ptr + worker * 4 + 3)
    share = load_complete(share_chunks_ptr)
    context_len = load_complete(context_lens_ptr + first_row, num_chunks > 0, 0)
    wait_for_predecessor(EARLY)
    v_scale = 1.0
    if IN_FP8:
        factor *= tl.load(kv_scales_ptr)
        v_scale = tl.load(kv_scales_ptr + 1)
    # One program serves all query heads of a KV head, so that each key is read once.
    g, d, v_d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    head = kv_head * GROUP + g
    mask = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    out_mask = (g < GROUP)[:, None] & (v_d < VALUE_DIM)[None, :]
    slopes = None
    if slopes_ptr is not None:
        slopes = load_slopes(slopes_ptr, head, g < GROUP)

    left = num_chunks
    for row in range(first_row, last_row + 1):
        first_key = tl.maximum(context_len - WINDOW, 0) if WINDOW > 0 else 0
        skipped = first_key // CHUNK  # chunks before the window; `chunk` and `end_chunk` count from the next one
        row_chunks = tl.cdiv(context_len, CHUNK) - skipped
        end_chunk = tl.minimum(row_chunks, chunk + left)
        is_whole = (chunk == 0) & (end_chunk == row_chunks)
        q = tl.load(q_ptr + row * q_stride + head[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0)
        position = tl.zeros([BLOCK_G], tl.int32) + context_len - 1
        row_begin = worker * share + (num_chunks - left) - chunk
        first_worker = row_begin // share
        place = (kv_head * places + (row if BY_ROW else first_worker)) * most_chunks

        top, total = before_keys(sinks_ptr, head, g < GROUP, SINKS, BLOCK_G)
        acc = tl.zeros([BLOCK_G, BLOCK_V], tl.float32)
        for own in range(chunk, end_chunk):
            begin = (skipped + own) * CHUNK
            more = attend_to_chunk(
                q,
                position,
                tl.maximum(begin, first_key // TILE * TILE),
                tl.minimum(begin + CHUNK, context_len),
                context_len,
                first_key,
                block_tables_ptr + row * table_stride,
                k_cache_ptr,
                v_cache_ptr,
                kv_head,
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
                BLOCK_G,
                BLOCK_D,
                BLOCK_V,
            )
            if is_whole:
                acc, top, total = join(acc, top, total, more[0], more[1], more[2])
            else:
                at = (place + own).to(tl.int64) * GROUP + g
                tl.store(partial_ptr + at[:, None] * VALUE_DIM + v_d[None, :], more[0], mask=out_mask)
                tl.store(sums_ptr + at * 2, more[1], mask=g < GROUP)
                tl.store(sums_ptr + at * 2 + 1, more[2], mask=g < GROUP)

        target = out_ptr + ((row * KV_HEADS + kv_head) * GROUP + g)[:, None] * VALUE_DIM + v_d[None, :]
        if is_whole:
            tl.store(target, result(acc * v_scale, total).to(out_ptr.dtype.element_ty), mask=out_mask)
        else:
            num_workers = (row_begin + row_chunks - 1) // share - first_worker + 1
            tl.debug_barrier()  # every thread's stores come before the arrival that announces them
            arrival = arrivals_ptr + row * KV_HEADS + kv_head
            if tl.atomic_add(arrival, 1, sem="acq_rel") == num_workers - 1:
                tl.store(arrival, 0)
                top, total = before_keys(sinks_ptr, head, g < GROUP, SINKS, BLOCK_G)
                acc, total = _join_all(
                    top, total, partial_ptr, sums_ptr, place, row_chunks, GROUP, VALUE_DIM, BLOCK_G, BLOCK_V
                )
                tl.store(target, result(acc * v_scale, total).to(out_ptr.dtype.element_ty), mask=out_mask)
        left -= end_chunk - chunk
        chunk = 0
        context_len = tl.load(context_lens_ptr + row + 1, row < last_row, 0)


@triton.jit
def _join_all(
    top,
    total,
    partial_ptr,
    sums_ptr,
    place,
    num_chunks,
    GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Put the results of a row's chunks together, from `place` on. top, total: from `before_keys`"""
    g, v_d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_V)
    acc = tl.zeros([BLOCK_G, BLOCK_V], tl.float32)
    for start in range(0, num_chunks, COMBINED_AT_ONCE):
        for offset in tl.static_range(COMBINED_AT_ONCE):
            chunk = start + offset
            is_head = g < tl.where(chunk < num_chunks, GROUP, 0)
            at = (place + chunk).to(tl.int64) * GROUP + g
            # ".cg" reads past the L1 cache, which may hold an earlier layer's numbers.
            next_top = tl.load(sums_ptr + at * 2, mask=is_head, other=UNSEEN, cache_modifier=".cg")
            next_total = tl.load(sums_ptr + at * 2 + 1, mask=is_head, other=0.0, cache_modifier=".cg")
            numbers = partial_ptr + at[:, None] * VALUE_DIM + v_d[None, :]
            loaded = is_head[:, None] & (v_d < VALUE_DIM)[None, :]
            next_acc = tl.load(numbers, mask=loaded, other=0.0, cache_modifier=".cg")
            acc, top, total = join(acc, top, total, next_acc, next_top, next_total)
    return acc, total
