"""Attention of one new token per sequence over the paged cache, by programs whose shares of the keys a plan gives."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.attention.decode.bundles import load_queries
from nanoinfer.kernels.attention.decode.decode_plan import DecodePlan, begin_of, worker_of
from nanoinfer.kernels.attention.fp8 import LANES, can_split, load_halves, multiply_keys, narrow_queries, read, twice
from nanoinfer.kernels.attention.prefixes.shared_prefix import SharedResults, add_shared_results
from nanoinfer.kernels.attention.scores import (
    Bias,
    bias_in_log2,
    combine_partials,
    explicit_attention,
    first_numbers,
    in_log2,
    load_sinks,
    load_slopes,
    scores_in_log2,
)
from nanoinfer.kernels.fp8 import FP8, as_bytes
from nanoinfer.kernels.launch import (
    launch_options,
    load_complete,
    next_power_of_2,
    start_successor,
    wait_for_predecessor,
)


def paged_decode_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    max_context_len: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    kv_scales: Tensor | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """Attend from each row's one query to the first `context_lens` tokens of its block table.

    q: [rows, heads, head_dim]; heads is a multiple of kv_heads
    k_cache, v_cache: [blocks, block_size, kv_heads, head_dim], the new tokens already written; a value may have another
        size than a key
    block_tables: [rows, max blocks] int32
    context_lens: [rows] int32, none above max_context_len; the output of a row with no context is not defined
    window: how many tokens the query sees, the last of its context; the others are not read. None: all
    softcap: see explicit_attention
    kv_scales: [2] float32, the scale of the keys and that of the values in a cache of FP8 (see fp8.py)
    sinks: [heads] float32, a score of each query of the head beside the keys' (see scores.py); None: there are none
    slopes: [heads] float32, ALiBi's of the query heads (see scores.py); None: there are none
    Returns [rows, heads, numbers of a value].
    """
    rows, heads, head_dim = q.shape
    _, block_size, kv_heads, _ = k_cache.shape
    keys = max_context_len if window is None else min(window, max_context_len)
    positions = (context_lens - keys).clamp(min=0)[:, None] + torch.arange(keys, device=q.device)
    lens = context_lens[:, None].clamp(min=1)
    mask = (positions < lens)[:, None, None]
    positions = positions.minimum(lens - 1)  # not beyond the context, where the cache may hold NaN
    blocks = block_tables.gather(1, positions // block_size)

    def gather(cache: Tensor, scale: Tensor | None) -> Tensor:  # [rows, kv_heads, keys, head_dim]
        cached = as_bytes(cache)[blocks, positions % block_size].view(cache.dtype)
        return read(cached, q.dtype, scale).transpose(1, 2)

    k_scale, v_scale = (None, None) if kv_scales is None else kv_scales
    k, v = gather(k_cache, k_scale), gather(v_cache, v_scale)
    # The query heads of one KV head become several queries of one head, so that no key is copied for them.
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, head_dim)
    if softcap is None and sinks is None and slopes is None:
        bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, float("-inf"))
        attended = F.scaled_dot_product_attention(grouped, k, v, bias, scale=scale)
    else:
        of_heads = None if sinks is None else sinks.view(kv_heads, -1)
        alibi = None if slopes is None else Bias.of(slopes.view(kv_heads, -1), lens[..., None] - 1, positions[:, None])
        attended = explicit_attention(grouped, k, v, mask, scale, softcap, of_heads, alibi)
    return attended.reshape(rows, heads, -1)


def paged_decode_triton(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    plan: DecodePlan,
    softcap: float | None = None,
    kv_scales: Tensor | None = None,
    shared: SharedResults | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """paged_decode_reference with the plan's window, as one launch, or as two that follow attend_to_prefixes.

    plan: from plan_decode of the same context_lens; if it has bundles, queries in none of them get no output
    shared: what attend_to_prefixes, the launch just before, makes of the tokens that come before the plan's own_starts;
        None: the plan has no own_starts
    """
    assert (shared is None) == (plan.own_starts is None)
    assert k_cache.stride() == v_cache.stride()
    bundles = plan.bundles
    (rows, heads, head_dim), value_dim = q.shape, v_cache.shape[3]
    _, block_size, kv_heads, _ = k_cache.shape
    group, workers = heads // kv_heads, plan.shares.shape[0]
    lanes = group if bundles is None else group * bundles.queries
    in_terms = bundles is None and can_split(q, k_cache, plan.programs.tile)
    factor, cap = in_log2(scale, softcap)
    out = torch.empty((rows, heads, value_dim), dtype=q.dtype if shared is None else torch.float32, device=q.device)
    out_lse = None if shared is None else torch.empty((rows, heads), dtype=torch.float32, device=q.device)
    # Partial results of rows that several workers share. A worker has room for two: its first row's and its last row's.
    partial = torch.empty((kv_heads, workers, 2, lanes, value_dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((kv_heads, workers, 2, lanes), dtype=torch.float32, device=q.device)
    grid = (workers, kv_heads) if shared is None else (kv_heads, workers)  # so that late workers come last
    _paged_decode_kernel[grid](
        q,
        k_cache,
        v_cache,
        block_tables,
        context_lens if bundles is None else bundles.context_lens,
        None if bundles is None else bundles.tokens,
        None if bundles is None else context_lens,
        plan.own_starts,
        plan.shares,
        plan.share_tiles,
        plan.arrivals,
        partial,
        lse,
        out,
        out_lse,
        kv_scales,
        sinks,
        slopes,
        factor,
        q.stride(0),
        block_tables.stride(0),
        SHARES=shared is not None,
        KV_HEADS=kv_heads,
        GROUP=group,
        QUERIES=1 if bundles is None else bundles.queries,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        STRIDE=k_cache.stride(2),
        BLOCK_SIZE=block_size,
        WINDOW=plan.window or 0,
        CAP=cap,
        SINKS=sinks is not None,
        IN_FP8=k_cache.dtype == FP8,
        IN_TERMS=in_terms,
        ON_GPU=q.is_cuda,
        MAKE_WAY=plan.programs.make_way and shared is None,
        TILE=plan.programs.tile,
        BLOCK_G=max(16, next_power_of_2(lanes)),
        BLOCK_D=max(16, next_power_of_2(head_dim)),
        BLOCK_V=max(16, next_power_of_2(value_dim)),
        num_warps=plan.programs.warps,
        num_stages=plan.programs.stages,
        maxnreg=plan.programs.registers,
        **launch_options(q),
    )
    if shared is None:
        return out
    assert out_lse is not None
    return add_shared_results(out, out_lse, shared, q.dtype)


@triton.jit
def _paged_decode_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    context_lens_ptr,
    tokens_ptr,
    query_lens_ptr,
    own_starts_ptr,
    shares_ptr,
    share_tiles_ptr,
    arrivals_ptr,
    partial_ptr,
    lse_ptr,
    out_ptr,
    out_lse_ptr,
    kv_scales_ptr,
    sinks_ptr,
    slopes_ptr,
    factor,
    q_stride,
    table_stride,
    SHARES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    SINKS: tl.constexpr,
    IN_FP8: tl.constexpr,
    IN_TERMS: tl.constexpr,
    ON_GPU: tl.constexpr,
    MAKE_WAY: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    EARLY: tl.constexpr,
):
    if SHARES:
        kv_head, worker, workers = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    else:
        worker, kv_head, workers = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    # The predecessor writes queries, keys and values; the plan and the lengths are older.
    first_row = load_complete(shares_ptr + worker * 4)
    last_row = load_complete(shares_ptr + worker * 4 + 1)
    tile = load_complete(shares_ptr + worker * 4 + 2)
    num_tiles = load_complete(shares_ptr + worker * 4 + 3)
    share = load_complete(share_tiles_ptr)
    late_share, first_late = load_complete(share_tiles_ptr + 1), load_complete(share_tiles_ptr + 2)
    context_len = load_complete(context_lens_ptr + first_row, num_tiles > 0, 0)
    if QUERIES > 1:  # the rows are bundles; a lane of the program has one head of one query
        token, query_len = load_queries(tokens_ptr, query_lens_ptr, first_row, num_tiles > 0, GROUP, QUERIES, BLOCK_G)
    # If rows share prefixes, the predecessor attends to these. It writes nothing that is read here, and uses nothing
    # that is written here: so this kernel does all of its work meanwhile. Its plain loads find nothing older in the L1
    # cache: the step has written the block tables before all layers, and nobody has read the newest keys.
    if not SHARES:
        wait_for_predecessor(EARLY, START_SUCCESSOR=MAKE_WAY)

    if IN_FP8:
        factor *= load_complete(kv_scales_ptr)
        v_scale = load_complete(kv_scales_ptr + 1)
    # One program serves all query heads of a KV head, so that each key is read once.
    g = tl.arange(0, BLOCK_G)
    n = tl.arange(0, TILE)
    d = tl.arange(0, BLOCK_D)
    v_d = tl.arange(0, BLOCK_V)
    half = tl.arange(0, BLOCK_V // 2)
    lane = g % GROUP if QUERIES > 1 else g % LANES if IN_TERMS else g
    head = kv_head * GROUP + lane
    q_mask, out_mask = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :], (g < GROUP)[:, None] & (v_d < VALUE_DIM)[None, :]
    KEYS: tl.constexpr = 0 if IN_TERMS else 1  # the axis of the scores that has a place for each key
    V_DTYPE: tl.constexpr = tl.float16 if q_ptr.dtype.element_ty == tl.bfloat16 else q_ptr.dtype.element_ty
    scored = tl.arange(0, LANES if IN_TERMS else BLOCK_G)
    if slopes_ptr is not None:
        has_slope = scored < (GROUP if QUERIES == 1 else BLOCK_G)
        slopes = load_slopes(slopes_ptr, kv_head * GROUP + scored if IN_TERMS else head, has_slope)

    left = num_tiles
    for row in range(first_row, last_row + 1):
        row_tiles = tl.cdiv(context_len, TILE)
        skipped = 0  # tiles before the window, or the row's own; `tile` and `end_tile` count from the next one
        if SHARES:
            skipped = load_complete(own_starts_ptr + row) // TILE
            row_tiles -= skipped
        if WINDOW > 0:
            first_key = tl.maximum(context_len - (WINDOW + QUERIES - 1), 0)
            skipped = first_key // TILE
            row_tiles -= skipped
        end_tile = tl.minimum(row_tiles, tile + left)
        if QUERIES > 1:
            table_row = tl.maximum(tl.max(token, axis=0), 0)
            q_mask = (token >= 0)[:, None] & (d < HEAD_DIM)[None, :]
            out_mask = (token >= 0)[:, None] & (v_d < VALUE_DIM)[None, :]
            q_ptrs = q_ptr + token[:, None] * q_stride + head[:, None] * HEAD_DIM + d[None, :]
            if WINDOW > 0:
                first_key = tl.maximum(tl.min(tl.where(token >= 0, query_len, context_len), axis=0) - WINDOW, 0)
        else:
            table_row, token = row, row
            q_ptrs = q_ptr + row * q_stride + head[:, None] * HEAD_DIM + d[None, :]
        loaded = (lane < GROUP)[:, None] & (d < HEAD_DIM)[None, :] if IN_TERMS else q_mask
        q = load_complete(q_ptrs, loaded, 0.0) if SHARES else tl.load(q_ptrs, mask=loaded, other=0.0)
        table = block_tables_ptr + table_row * table_stride
        row_factor = factor
        if IN_FP8 and q.dtype == tl.bfloat16:
            q, unit = narrow_queries(q, IN_TERMS)
            row_factor = factor * tl.expand_dims(unit, KEYS)

        top = tl.full(scored.shape, -1e30, tl.float32)
        total = tl.zeros(scored.shape, tl.float32)
        if SINKS:  # the program that begins the row counts them
            has_sink = tl.where(tile == 0, token, -1) >= 0 if QUERIES > 1 else scored < tl.where(tile == 0, GROUP, 0)
            top = load_sinks(sinks_ptr, kv_head * GROUP + scored if IN_TERMS else head, has_sink)
            total = has_sink.to(tl.float32)
        if IN_TERMS:  # each key of a tile has a total of its own, so that a sum over keys waits for the row's end
            total = tl.where((n == 0)[:, None], total[None, :], 0.0)
        acc = tl.zeros([BLOCK_G, BLOCK_V // 2 if IN_FP8 else BLOCK_V], tl.float32)
        acc2 = acc
        for start in range((skipped + tile) * TILE, (skipped + end_tile) * TILE, TILE):
            first = first_numbers(table, start, n, kv_head, KV_HEADS, STRIDE, BLOCK_SIZE)[:, None]
            seen = start + n < context_len
            if WINDOW > 0:
                seen &= start + n >= first_key
            k_mask = seen[:, None] & (d < HEAD_DIM)[None, :]
            k = tl.load(k_cache_ptr + first + d[None, :], mask=k_mask, other=0.0).to(q.dtype)
            if IN_FP8:
                half_mask = seen[:, None] & (half < VALUE_DIM // 2)[None, :]
                v, v2 = load_halves(v_cache_ptr, first // 2 + half[None, :], half_mask, V_DTYPE, ON_GPU)
            else:
                v_mask = seen[:, None] & (v_d < VALUE_DIM)[None, :]
                v = tl.load(v_cache_ptr + first + v_d[None, :], mask=v_mask, other=0.0)
            scores = scores_in_log2(multiply_keys(q, k, IN_TERMS), row_factor, CAP)
            if slopes_ptr is not None:
                position = (query_len[:, None] if QUERIES > 1 else context_len) - 1
                key = tl.expand_dims(start + n, 1 - KEYS)
                scores += bias_in_log2(tl.expand_dims(slopes, KEYS), key, position)
            if QUERIES > 1:
                sees = start + n[None, :] < query_len[:, None]
                if WINDOW > 0:
                    sees &= start + n[None, :] >= query_len[:, None] - WINDOW
                scores = tl.where(sees, scores, -1e30)
            else:
                scores = tl.where(tl.expand_dims(seen, 1 - KEYS), scores, -1e30)
            new_top = tl.maximum(top, tl.max(scores, axis=KEYS))
            weights = tl.exp2(scores - tl.expand_dims(new_top, KEYS))
            rescale = tl.exp2(top - new_top)
            if IN_TERMS:
                total = total * rescale[None, :] + weights
                weights, rescale = tl.trans(twice(weights)), twice(rescale)
            else:
                total = total * rescale + tl.sum(weights, axis=1)
            acc = acc * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            if IN_FP8:
                acc2 = acc2 * rescale[:, None] + tl.dot(weights.to(v.dtype), v2, input_precision="ieee")
            top = new_top
        if IN_FP8:
            acc = tl.interleave(acc, acc2) * v_scale
        if IN_TERMS:
            top, total = twice(top), twice(tl.sum(total, axis=0))
        acc = acc / tl.maximum(total, 1e-30)[:, None]

        first_head = (token * KV_HEADS + kv_head) * GROUP
        if QUERIES > 1:
            first_head -= g // GROUP * GROUP  # lane g has head g % GROUP
        if (tile == 0) & (end_tile == row_tiles):
            target = out_ptr + (first_head + g)[:, None] * VALUE_DIM + v_d[None, :]
            tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=out_mask)
            if SHARES:
                is_query = token >= 0 if QUERIES > 1 else g < GROUP
                tl.store(out_lse_ptr + first_head + g, top + tl.log2(total), mask=is_query)
        else:
            # The partial result of this row has place 0 if another worker begins the row, else place 1.
            place = (kv_head * workers + worker) * 2 + (tile == 0)
            partial = partial_ptr + place * (QUERIES * GROUP * VALUE_DIM) + g[:, None] * VALUE_DIM + v_d[None, :]
            tl.store(partial, acc, mask=out_mask)
            is_query = token >= 0 if QUERIES > 1 else g < GROUP
            tl.store(lse_ptr + place * (QUERIES * GROUP) + g, top + tl.log2(tl.maximum(total, 1e-30)), mask=is_query)
            row_begin = begin_of(worker, share, late_share, first_late, SHARES) + (num_tiles - left) - tile
            first_worker = worker_of(row_begin, share, late_share, first_late, SHARES)
            last_worker = worker_of(row_begin + row_tiles - 1, share, late_share, first_late, SHARES)
            num_partials = last_worker - first_worker + 1
            tl.debug_barrier()  # every thread's stores come before the arrival that announces them
            arrival = arrivals_ptr + row * KV_HEADS + kv_head
            if tl.atomic_add(arrival, 1, sem="acq_rel") == num_partials - 1:
                tl.store(arrival, 0)
                combine_partials(
                    partial_ptr,
                    lse_ptr,
                    out_ptr,
                    out_lse_ptr,
                    first_head,
                    kv_head * workers + first_worker,
                    num_partials,
                    token,
                    SHARES,
                    GROUP,
                    QUERIES,
                    VALUE_DIM,
                )
        left -= end_tile - tile
        tile = 0
        if QUERIES > 1:
            token, query_len = load_queries(
                tokens_ptr, query_lens_ptr, row + 1, row < last_row, GROUP, QUERIES, BLOCK_G
            )
        next_len = context_lens_ptr + row + 1
        context_len = load_complete(next_len, row < last_row, 0) if SHARES else tl.load(next_len, row < last_row, 0)
    if SHARES:
        wait_for_predecessor(EARLY, START_SUCCESSOR=False)
    if not MAKE_WAY:
        start_successor(EARLY)  # not earlier: the successor would only take up room
