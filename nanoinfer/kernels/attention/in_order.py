"""Attention whose every sum has one order: a token's result has the same bits, prompt or generated, in any company.

A sequence's keys are cut into chunks, which begin at multiples of CHUNK from its first token. A query attends to each
chunk alone, a tile of keys after the other. The chunks' results are put together in their order. Which program does
which chunk does not matter, nor how many queries it has at hand. Keys that a query does not see add exact zeros.

The compiler must not round a product and a sum once together (enable_fp_fusion): it might do so in one kernel only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.attention.decode_plan import DecodePlan, Programs
from nanoinfer.kernels.attention.scores import in_log2, scores_in_log2
from nanoinfer.kernels.fp8 import FP8
from nanoinfer.kernels.launch import early_launch, start_successor, wait_for_predecessor

CHUNK = 256  # keys
TILE_BYTES = 16 << 10  # of keys, and as many of values
MAX_TILE = 64  # keys
QUERIES = 64  # of a prefill program
COMBINED_AT_ONCE = tl.constexpr(4)  # chunks' results that a program loads at once
DECODE_PROGRAMS = Programs(tile=CHUNK, stages=5, warps=4, per_multiprocessor=2)
UNSEEN = tl.constexpr(-1e30)  # the score of a key that a query does not see


def tile_of(k_cache: Tensor) -> int:
    """Return how many keys are multiplied at a time; k_cache: [blocks, block_size, kv_heads, head_dim]."""
    row_bytes = max(16, triton.next_power_of_2(k_cache.shape[3])) * k_cache.itemsize
    return max(16, min(MAX_TILE, TILE_BYTES // row_bytes))


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
) -> Tensor:
    """Attend as paged_decode_reference does, with the plan's window, in one launch.

    plan: from plan_decode of the same context_lens, for DECODE_PROGRAMS
    """
    rows, heads, head_dim = q.shape
    _, block_size, kv_heads, _ = k_cache.shape
    group, workers = heads // kv_heads, plan.shares.shape[0]
    factor, cap = in_log2(scale, softcap)
    out = torch.empty((rows, heads, head_dim), dtype=q.dtype, device=q.device)
    # The chunks' results of rows that several workers share: a worker begins at most one of these.
    places = kv_heads, min(rows, workers), triton.cdiv(max_context_len, CHUNK), group
    partial = torch.empty((*places, head_dim), dtype=torch.float32, device=q.device)
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
        factor,
        q.stride(0),
        block_tables.stride(0),
        places[1],
        places[2],
        BY_ROW=rows <= workers,
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        WINDOW=plan.window or 0,
        CAP=cap,
        IN_FP8=k_cache.dtype == FP8,
        CHUNK=CHUNK,
        TILE=tile_of(k_cache),
        BLOCK_G=max(16, triton.next_power_of_2(group)),
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        num_warps=plan.programs.warps,
        num_stages=plan.programs.stages,
        enable_fp_fusion=False,
        **early_launch(q),
    )
    return out


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
) -> Tensor:
    """Attend as paged_prefill_triton does."""
    tokens, heads, head_dim = q.shape
    _, block_size, kv_heads, _ = k_cache.shape
    out = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=q.device)
    factor, cap = in_log2(scale, softcap)
    _prefill_kernel[(heads, triton.cdiv(max_query_len, QUERIES), len(context_lens))](
        q,
        k_cache,
        v_cache,
        block_tables,
        cu_query_lens,
        context_lens,
        out,
        kv_scales,
        factor,
        q.stride(0),
        block_tables.stride(0),
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        WINDOW=window or 0,
        CAP=cap,
        IN_FP8=k_cache.dtype == FP8,
        CHUNK=CHUNK,
        TILE=tile_of(k_cache),
        BLOCK_M=QUERIES,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        num_warps=4,
        num_stages=3,
        enable_fp_fusion=False,
    )
    return out


@triton.jit
def _attend_to_chunk(
    q,
    position,
    begin,
    end,
    context_len,
    first_key,
    table,
    k_cache_ptr,
    v_cache_ptr,
    kv_head,
    factor,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Attend from queries, [BLOCK_M, BLOCK_D], to the keys from `begin`, where a tile begins, up to `end`.

    position: [BLOCK_M], of the queries in their sequence
    context_len, first_key: keys at `context_len` or beyond, and those before `first_key`, are not loaded
    Returns the weighted sum of the values, [BLOCK_M, BLOCK_D], the largest score, and the sum of the weights.
    """
    n, d = tl.arange(0, TILE), tl.arange(0, BLOCK_D)
    top = tl.full([BLOCK_M], UNSEEN, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(begin, end, TILE):
        key = start + n
        if BLOCK_SIZE % TILE == 0:
            block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
            slot = block * BLOCK_SIZE + start % BLOCK_SIZE + n
        else:
            block = tl.load(table + key // BLOCK_SIZE, mask=key < context_len, other=0).to(tl.int64)
            slot = block * BLOCK_SIZE + key % BLOCK_SIZE
        offsets = (slot * KV_HEADS + kv_head)[:, None] * HEAD_DIM + d[None, :]
        is_loaded = ((key >= first_key) & (key < context_len))[:, None] & (d < HEAD_DIM)[None, :]
        k = tl.load(k_cache_ptr + offsets, mask=is_loaded, other=0.0).to(q.dtype)
        scores = scores_in_log2(tl.dot(q, tl.trans(k), input_precision="ieee"), factor, CAP)
        seen = key[None, :] <= position[:, None]
        if WINDOW > 0:
            seen &= key[None, :] > position[:, None] - WINDOW
        # Where a query sees no key of a tile, each gets the weight 1; the first one seen makes `rescale` 0.
        scores = tl.where(seen, scores, UNSEEN)
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_top[:, None])
        rescale = tl.exp2(top - new_top)
        v = tl.load(v_cache_ptr + offsets, mask=is_loaded, other=0.0).to(q.dtype)
        # The order of tl.sum depends on how threads hold the weights, that of a product does not.
        ones = tl.full([TILE, 16], 1.0, q.dtype)
        sums = tl.max(tl.dot(weights.to(q.dtype), ones, input_precision="ieee"), axis=1)
        total = total * rescale + sums
        acc = tl.dot(weights.to(q.dtype), v, acc * rescale[:, None], input_precision="ieee")
        top = new_top
    return acc, top, total


@triton.jit
def _join(acc, top, total, next_acc, next_top, next_total):
    """Put the result of the next chunk to that of the chunks before."""
    new_top = tl.maximum(top, next_top)
    own, other = tl.exp2(top - new_top), tl.exp2(next_top - new_top)
    return acc * own[:, None] + next_acc * other[:, None], new_top, total * own + next_total * other


@triton.jit
def _result(acc, total):
    return acc / tl.maximum(total, 1e-30)[:, None]


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
    factor,
    q_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    IN_FP8: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # The programs with the most keys come first. The heads that share a KV head run side by side.
    head, tile, seq = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1), tl.program_id(2)
    begin = tl.load(cu_query_lens_ptr + seq)
    query_len = tl.load(cu_query_lens_ptr + seq + 1) - begin
    context_len = tl.load(context_lens_ptr + seq)
    if tile * BLOCK_M < query_len:
        m, d = tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
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
        top = tl.full([BLOCK_M], UNSEEN, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for chunk in range(first_key // CHUNK * CHUNK, end, CHUNK):
            more = _attend_to_chunk(
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
                KV_HEADS,
                HEAD_DIM,
                BLOCK_SIZE,
                WINDOW,
                CAP,
                TILE,
                BLOCK_M,
                BLOCK_D,
            )
            acc, top, total = _join(acc, top, total, more[0], more[1], more[2])
        if IN_FP8:
            acc *= tl.load(kv_scales_ptr + 1)
        out = out_ptr + token * (KV_HEADS * GROUP * HEAD_DIM) + head * HEAD_DIM + d[None, :]
        tl.store(out, _result(acc, total).to(out_ptr.dtype.element_ty), mask=q_mask)


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
    factor,
    q_stride,
    table_stride,
    places,
    most_chunks,
    BY_ROW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    IN_FP8: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
):
    worker, kv_head = tl.program_id(0), tl.program_id(1)
    wait_for_predecessor(EARLY, START_SUCCESSOR=False)
    first_row, last_row = tl.load(shares_ptr + worker * 4), tl.load(shares_ptr + worker * 4 + 1)
    chunk, num_chunks = tl.load(shares_ptr + worker * 4 + 2), tl.load(shares_ptr + worker * 4 + 3)
    share = tl.load(share_chunks_ptr)
    v_scale = 1.0
    if IN_FP8:
        factor *= tl.load(kv_scales_ptr)
        v_scale = tl.load(kv_scales_ptr + 1)
    # One program serves all query heads of a KV head, so that each key is read once.
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + g
    mask = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]

    left = num_chunks
    for row in range(first_row, last_row + 1):
        context_len = tl.load(context_lens_ptr + row)
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

        top = tl.full([BLOCK_G], UNSEEN, tl.float32)
        total = tl.zeros([BLOCK_G], tl.float32)
        acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
        for own in range(chunk, end_chunk):
            begin = (skipped + own) * CHUNK
            more = _attend_to_chunk(
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
                KV_HEADS,
                HEAD_DIM,
                BLOCK_SIZE,
                WINDOW,
                CAP,
                TILE,
                BLOCK_G,
                BLOCK_D,
            )
            if is_whole:
                acc, top, total = _join(acc, top, total, more[0], more[1], more[2])
            else:
                at = (place + own).to(tl.int64) * GROUP + g
                tl.store(partial_ptr + at[:, None] * HEAD_DIM + d[None, :], more[0], mask=mask)
                tl.store(sums_ptr + at * 2, more[1], mask=g < GROUP)
                tl.store(sums_ptr + at * 2 + 1, more[2], mask=g < GROUP)

        target = out_ptr + ((row * KV_HEADS + kv_head) * GROUP + g)[:, None] * HEAD_DIM + d[None, :]
        if is_whole:
            tl.store(target, _result(acc * v_scale, total).to(out_ptr.dtype.element_ty), mask=mask)
        else:
            num_workers = (row_begin + row_chunks - 1) // share - first_worker + 1
            tl.debug_barrier()  # every thread's stores come before the arrival that announces them
            arrival = arrivals_ptr + row * KV_HEADS + kv_head
            if tl.atomic_add(arrival, 1, sem="acq_rel") == num_workers - 1:
                tl.store(arrival, 0)
                acc, total = _join_all(partial_ptr, sums_ptr, place, row_chunks, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D)
                tl.store(target, _result(acc * v_scale, total).to(out_ptr.dtype.element_ty), mask=mask)
        left -= end_chunk - chunk
        chunk = 0
    start_successor(EARLY)  # not earlier: the successor would only take up room


@triton.jit
def _join_all(
    partial_ptr,
    sums_ptr,
    place,
    num_chunks,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Put the results of a row's chunks together, from `place` on."""
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    top = tl.full([BLOCK_G], UNSEEN, tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in range(0, num_chunks, COMBINED_AT_ONCE):
        for offset in tl.static_range(COMBINED_AT_ONCE):
            chunk = start + offset
            is_head = g < tl.where(chunk < num_chunks, GROUP, 0)
            at = (place + chunk).to(tl.int64) * GROUP + g
            # ".cg" reads past the L1 cache, which may hold an earlier layer's numbers.
            next_top = tl.load(sums_ptr + at * 2, mask=is_head, other=UNSEEN, cache_modifier=".cg")
            next_total = tl.load(sums_ptr + at * 2 + 1, mask=is_head, other=0.0, cache_modifier=".cg")
            numbers = partial_ptr + at[:, None] * HEAD_DIM + d[None, :]
            loaded = is_head[:, None] & (d < HEAD_DIM)[None, :]
            next_acc = tl.load(numbers, mask=loaded, other=0.0, cache_modifier=".cg")
            acc, top, total = _join(acc, top, total, next_acc, next_top, next_total)
    return acc, total
