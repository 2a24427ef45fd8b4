"""Decode attention to latents: a tile of them is loaded once, for all heads of a row, and is keys and values."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.attention.decode.bundles import Bundles, load_queries
from nanoinfer.kernels.attention.decode.decode_plan import DecodePlan, Programs, plan_decode
from nanoinfer.kernels.attention.prefixes.prefix_plan import SharedPrefixes
from nanoinfer.kernels.attention.prefixes.shared_prefix import SharedResults, add_shared_results
from nanoinfer.kernels.attention.scores import LOG2_E, first_numbers
from nanoinfer.kernels.fp8 import FP8
from nanoinfer.kernels.latent.combine import Partials, combine
from nanoinfer.kernels.launch import (
    RESERVED_BYTES,
    launch_options,
    load_complete,
    next_power_of_2,
    num_multiprocessors,
    shared_memory,
    start_successor,
    wait_for_predecessor,
)

MOST_LANES = 64  # queries times heads of a program, whose results the registers of eight warps hold
MOST_WIDE_LANES = 32  # the same for numbers that are converted, or have more than 16 bits
LEAST_TILE = 16  # latents
FEW_ROWS = 8  # for whose few tiles small ones are the faster


def most_lanes(cache: Tensor) -> int:
    """Return how many queries times heads a program has room for."""
    return MOST_LANES if cache.itemsize == 2 else MOST_WIDE_LANES


def parts_of(heads: int, cache: Tensor) -> int:
    """Return into how many parts query heads that see one latent are divided: as few as programs have room for."""
    return next(parts for parts in range(1, heads + 1) if heads % parts == 0 and heads // parts <= most_lanes(cache))


def queries_at_once(most: int, heads: int, cache: Tensor) -> int:
    """Return how many queries of a row with up to `most` guesses a program should serve together."""
    return max(1, min(most + 1, most_lanes(cache) // heads))


def plan_latents(
    context_lens: Tensor,
    cache: Tensor,
    heads: int,
    latent: int,
    workers: int | None = None,
    programs: Programs | None = None,
    bundles: Bundles | None = None,
    prefixes: SharedPrefixes | None = None,
) -> DecodePlan:
    """plan_decode for meet_latents. heads: of a query; latent: numbers that are the value, too

    workers: programs for each part of the heads; programs: None: the fastest that are known
    """
    rows = len(context_lens) if bundles is None else len(bundles.context_lens)
    parts = parts_of(heads, cache) if bundles is None else 1
    lanes = heads // parts if bundles is None else heads * bundles.queries
    programs = programs or choose_programs(rows, cache, latent, lanes)
    workers = workers or max(1, programs.per_multiprocessor * num_multiprocessors(cache.device) // parts)
    return plan_decode(context_lens, cache, workers, prefixes=prefixes, programs=programs, bundles=bundles)


def choose_programs(rows: int, cache: Tensor, latent: int, lanes: int) -> Programs:
    """Return the programs of so many lanes that are the fastest on an H200.

    Shared memory holds the queries, and one tile, or two for products that start on their own.
    """
    _, block_size, _, numbers = cache.shape
    block_g = max(16, next_power_of_2(lanes))
    if block_g <= 16:
        programs = Programs(64, stages=2, warps=4, per_multiprocessor=2)
    elif block_g <= 32:
        programs = Programs(64 if rows <= FEW_ROWS else 128, stages=2, warps=8, per_multiprocessor=1)
    else:
        programs = Programs(64, stages=2, warps=8, per_multiprocessor=1)
    itemsize = max(2, cache.itemsize)
    held = itemsize * (2 if block_g > 32 else 1) + (1 if cache.dtype == FP8 else 0)  # bytes of a number in a tile
    padded = next_power_of_2(latent) + max(16, next_power_of_2(numbers - latent))
    room = (shared_memory(cache.device) - RESERVED_BYTES) // programs.per_multiprocessor - RESERVED_BYTES
    tile = programs.tile if cache.itemsize == 2 else programs.tile // 4  # others take more registers
    while tile > LEAST_TILE and padded * (tile * held + block_g * itemsize) + 2 * tile * block_g > room:
        tile //= 2
    return programs._replace(tile=math.gcd(block_size, tile))


def meet_latents(
    q: Tensor,
    cache: Tensor,
    latent: int,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    plan: DecodePlan,
    kv_scales: Tensor | None = None,
    shared: SharedResults | None = None,
) -> Tensor:
    """paged_decode_reference, whose values are the first numbers of the keys, in two launches.

    q: [rows, heads, numbers]; cache: [blocks, block_size, 1, numbers]; latent: so many of the numbers are a value
    plan: from plan_latents of the same context_lens; if it has bundles, queries in none of them get no output
    shared: what attend_to_shared_latents makes of what comes before the plan's own_starts; None: it has none
    Returns [rows, heads, latent].
    """
    assert (shared is None) == (plan.own_starts is None)
    (rows, heads, numbers), bundles = q.shape, plan.bundles
    queries = 1 if bundles is None else bundles.queries
    parts, workers = parts_of(heads, cache) if bundles is None else 1, plan.shares.shape[0]
    lanes = heads // parts * queries
    seen = context_lens if bundles is None else bundles.context_lens
    out = torch.empty((rows, heads, latent), dtype=q.dtype if shared is None else torch.float32, device=q.device)
    out_lse = None if shared is None else torch.empty((rows, heads), dtype=torch.float32, device=q.device)
    # Of rows that several workers share. A worker has room for two results: its first row's and its last row's.
    partial = torch.empty((parts, workers, 2, lanes, latent), dtype=torch.float32, device=q.device)
    lse = torch.empty((parts, workers, 2, lanes), dtype=torch.float32, device=q.device)
    _meet_kernel[(workers, parts)](
        q,
        cache,
        block_tables,
        seen,
        None if bundles is None else bundles.tokens,
        None if bundles is None else context_lens,
        plan.own_starts,
        plan.shares,
        partial,
        lse,
        out,
        out_lse,
        kv_scales,
        scale * LOG2_E.value,
        q.stride(0),
        block_tables.stride(0),
        HEADS=heads,
        LANES=lanes,
        QUERIES=queries,
        LATENT=latent,
        NUMBERS=numbers,
        BLOCK_SIZE=cache.shape[1],
        IN_FP8=cache.dtype == FP8,
        TILE=plan.programs.tile,
        BLOCK_G=max(16, next_power_of_2(lanes)),
        BLOCK_D=max(16, next_power_of_2(latent)),
        BLOCK_REST=max(16, next_power_of_2(numbers - latent)),
        num_warps=plan.programs.warps,
        num_stages=plan.programs.stages,
        **launch_options(q),
    )
    partials = Partials(partial, lse, plan.share_tiles, plan.programs.tile)
    tokens = None if bundles is None else bundles.tokens
    combine(partials, seen, tokens, plan.own_starts, heads, out, out_lse)
    if shared is None:
        return out
    assert out_lse is not None
    return add_shared_results(out, out_lse, shared, q.dtype)


@triton.jit
def _meet_kernel(
    q_ptr,
    cache_ptr,
    block_tables_ptr,
    context_lens_ptr,
    tokens_ptr,
    query_lens_ptr,
    own_starts_ptr,
    shares_ptr,
    partial_ptr,
    lse_ptr,
    out_ptr,
    out_lse_ptr,
    kv_scales_ptr,
    factor,
    q_stride,
    table_stride,
    HEADS: tl.constexpr,
    LANES: tl.constexpr,
    QUERIES: tl.constexpr,
    LATENT: tl.constexpr,
    NUMBERS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    IN_FP8: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    EARLY: tl.constexpr,
):
    worker, part, workers = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    # The predecessor writes queries and latents, or shared results; the plan and the lengths are older.
    first_row = load_complete(shares_ptr + worker * 4)
    last_row = load_complete(shares_ptr + worker * 4 + 1)
    tile = load_complete(shares_ptr + worker * 4 + 2)
    left = load_complete(shares_ptr + worker * 4 + 3)
    context_len = load_complete(context_lens_ptr + first_row, left > 0, 0)
    wait_for_predecessor(EARLY)
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    head = part * LANES + g if QUERIES == 1 else g % HEADS
    for row in range(first_row, last_row + 1):
        if QUERIES > 1:  # the rows are bundles; a lane has one head of one query
            token, sees = load_queries(tokens_ptr, query_lens_ptr, row, row <= last_row, HEADS, QUERIES, BLOCK_G)
            table_row, is_query = tl.maximum(tl.max(token, axis=0), 0), token >= 0
        else:
            token, sees, table_row, is_query = row, context_len, row, g < LANES
        skipped = 0  # tiles that other rows share; `tile` and `end_tile` count from the next one
        if own_starts_ptr is not None:
            skipped = tl.load(own_starts_ptr + row) // TILE
        row_tiles = tl.cdiv(context_len, TILE) - skipped
        end_tile = tl.minimum(row_tiles, tile + left)
        q_ptrs = q_ptr + token * q_stride + head * NUMBERS
        q, q_rest, unit = load_queries_of_latents(
            q_ptrs, is_query, factor, kv_scales_ptr, LATENT, NUMBERS, IN_FP8, BLOCK_D, BLOCK_REST
        )
        top = tl.full([BLOCK_G], -1e30, tl.float32)
        total = tl.zeros([BLOCK_G], tl.float32)
        acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
        table = block_tables_ptr + table_row * table_stride
        for start in range((skipped + tile) * TILE, (skipped + end_tile) * TILE, TILE):
            acc, total, top = meet_tile(
                q, q_rest, unit, cache_ptr, table, start, context_len, sees, LATENT, NUMBERS, BLOCK_SIZE, TILE,
                acc, total, top,
            )  # fmt: skip
        if IN_FP8:
            acc *= tl.load(kv_scales_ptr + 1)
        acc = acc / tl.maximum(total, 1e-30)[:, None]
        lse = top + tl.log2(tl.maximum(total, 1e-30))
        mask = is_query[:, None] & (d < LATENT)[None, :]
        if end_tile - tile == row_tiles:
            place = token * HEADS + head
            tl.store(out_ptr + place[:, None] * LATENT + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)
            if out_lse_ptr is not None:
                tl.store(out_lse_ptr + place, lse, mask=is_query)
        else:  # place 1 if this worker begins the row
            place = ((part * workers + worker) * 2 + (tile == 0)) * LANES + g
            tl.store(partial_ptr + place[:, None] * LATENT + d[None, :], acc, mask=mask)
            tl.store(lse_ptr + place, lse, mask=is_query)
        left -= end_tile - tile
        tile = 0
        context_len = tl.load(context_lens_ptr + row + 1, row < last_row, 0)
    start_successor(EARLY)  # not earlier: the successor would only take up room


@triton.jit
def load_queries_of_latents(
    q_ptrs,
    is_query,
    factor,
    kv_scales_ptr,
    LATENT: tl.constexpr,
    NUMBERS: tl.constexpr,
    IN_FP8: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Load lanes' queries; returns the numbers that meet latents, those that meet the rest of a key, and the unit.

    The scores are the products times the unit, [lanes, 1] or a number.
    """
    d, rest = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_REST)[None, :]
    q = tl.load(q_ptrs[:, None] + d, mask=is_query[:, None] & (d < LATENT), other=0.0)
    q_rest = tl.load(q_ptrs[:, None] + LATENT + rest, mask=is_query[:, None] & (rest < NUMBERS - LATENT), other=0.0)
    unit = factor
    if IN_FP8:
        unit *= tl.load(kv_scales_ptr)
        if q.dtype == tl.bfloat16:
            q, q_rest, largest = _narrow(q, q_rest)
            unit *= largest[:, None]
    return q, q_rest, unit


@triton.jit
def meet_tile(
    q,
    q_rest,
    unit,
    cache_ptr,
    table,
    start,
    context_len,
    sees,
    LATENT: tl.constexpr,
    NUMBERS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    acc,
    total,
    top,
):
    """Go on with the softmax of some lanes over a tile of latents, from `start` on (Milakov and Gimelshein, 2018).

    sees: how many latents a lane's query sees, [lanes] or a number; none sees more than context_len
    acc, total, top: the weighted sum of the latents, [lanes, numbers], the sum of the weights, and the largest score
    """
    n, d, rest = tl.arange(0, TILE), tl.arange(0, q.shape[1])[None, :], tl.arange(0, q_rest.shape[1])[None, :]
    first = cache_ptr + first_numbers(table, start, n, 0, 1, NUMBERS, BLOCK_SIZE)[:, None]
    is_key = (start + n < context_len)[:, None]
    k = tl.load(first + d, mask=is_key & (d < LATENT), other=0.0).to(q.dtype)
    k_rest = tl.load(first + LATENT + rest, mask=is_key & (rest < NUMBERS - LATENT), other=0.0).to(q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee") * unit
    if len(sees.shape) > 0:
        scores = tl.where((start + n)[None, :] < sees[:, None], scores, -1e30)
    else:
        scores = tl.where((start + n)[None, :] < sees, scores, -1e30)
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_top[:, None])
    rescale = tl.exp2(top - new_top)
    total = total * rescale + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(k.dtype), k, acc * rescale[:, None], input_precision="ieee")
    return acc, total, new_top


@triton.jit
def _narrow(q, rest):
    """Return two parts of queries, [lanes, numbers], as narrow_queries does, in one unit.

    A GPU converts FP8 to float16 twice as fast as to bfloat16; float16 holds queries of at most 1 well.
    """
    wide, wide_rest = q.to(tl.float32), rest.to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(wide), axis=1), tl.max(tl.abs(wide_rest), axis=1))
    largest = tl.maximum(largest, 1e-30)
    return (wide / largest[:, None]).to(tl.float16), (wide_rest / largest[:, None]).to(tl.float16), largest
