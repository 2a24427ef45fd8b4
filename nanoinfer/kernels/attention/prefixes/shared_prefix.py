"""Decode attention to prefixes that several rows share: each key is read once for many rows."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.attention.prefill.paged_prefill import Tiles, choose_tiles, fits
from nanoinfer.kernels.attention.prefixes.prefix_plan import (
    TILE_FIELDS,
    TILE_QUERIES,
    SharedPrefixes,
    SharedQueries,
    max_parts,
)
from nanoinfer.kernels.attention.scores import attend_to_tile, bias_in_log2, first_numbers, in_log2, load_slopes
from nanoinfer.kernels.fp8 import FP8
from nanoinfer.kernels.launch import cdiv, launch_options, load_complete, next_power_of_2, wait_for_predecessor

BLOCK_NUMBERS = 1024  # of the results that a program of add_shared_results puts together


class SharedResults(NamedTuple):
    """What attention to the keys that rows share gave: partial results of the rows.

    results: [parts, rows, heads, numbers of a value] float32
    lse: [parts, rows, heads] float32: log2 of the sums of exponentials by which the results were divided
    num_parts: [rows] int32, how many of the parts a row has
    """

    results: Tensor
    lse: Tensor
    num_parts: Tensor


def attend_to_prefixes(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    prefixes: SharedPrefixes,
    scale: float,
    softcap: float | None = None,
    kv_scales: Tensor | None = None,
    queries: SharedQueries | None = None,
    slopes: Tensor | None = None,
    context_lens: Tensor | None = None,
) -> SharedResults:
    """Attend from each row's query to the tokens that other rows share, in one launch.

    Arguments as for paged_decode_reference. It is the reference of this and of attention to the rows' own tokens
    together.

    queries: given if rows have several; then q and block_tables have a row for each of these
    context_lens: [rows] int32, how many keys each query sees; only slopes need it
    """
    assert k_cache.stride() == v_cache.stride()
    (rows, heads, head_dim), value_dim = q.shape, v_cache.shape[3]
    _, block_size, kv_heads, _ = k_cache.shape
    group = heads // kv_heads
    factor, cap = in_log2(scale, softcap)
    tiles = Tiles(TILE_QUERIES, 128, 4, 2)  # the fastest on an H200
    if q.itemsize > 2 or max(head_dim, value_dim) > 128 or not fits(tiles, q, value_dim):
        tiles = choose_tiles(q, value_dim, TILE_QUERIES, group=1)
    most_parts = max_parts(rows if queries is None else len(queries.starts) - 1)
    results = torch.empty((most_parts, rows, heads, value_dim), dtype=torch.float32, device=q.device)
    lse = torch.empty(results.shape[:3], dtype=torch.float32, device=q.device)
    _prefix_kernel[(prefixes.workers, kv_heads)](
        q,
        k_cache,
        v_cache,
        block_tables,
        prefixes.order if queries is None else queries.order,
        None if queries is None else queries.starts,
        prefixes.tiles,
        prefixes.num_tiles,
        results,
        lse,
        kv_scales,
        slopes,
        None if slopes is None else context_lens,
        factor,
        q.stride(0),
        block_tables.stride(0),
        rows,
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        STRIDE=k_cache.stride(2),
        BLOCK_SIZE=block_size,
        CAP=cap,
        IN_FP8=k_cache.dtype == FP8,
        FIELDS=TILE_FIELDS,
        TILE=math.gcd(block_size, tiles.keys),
        BLOCK_M=max(TILE_QUERIES, next_power_of_2(group)),
        BLOCK_D=max(16, next_power_of_2(head_dim)),
        BLOCK_V=max(16, next_power_of_2(value_dim)),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **launch_options(q),
    )
    return SharedResults(results, lse, prefixes.num_parts if queries is None else queries.num_parts)


@triton.jit(do_not_specialize=["rows"])
def _prefix_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    order_ptr,
    starts_ptr,
    tiles_ptr,
    num_tiles_ptr,
    results_ptr,
    lse_ptr,
    kv_scales_ptr,
    slopes_ptr,
    context_lens_ptr,
    factor,
    q_stride,
    table_stride,
    rows,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAP: tl.constexpr,
    IN_FP8: tl.constexpr,
    FIELDS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY)  # attention to the keys that rows do not share starts at once
    kv_head = tl.program_id(1)
    if IN_FP8:
        factor *= tl.load(kv_scales_ptr)
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, TILE)
    d = tl.arange(0, BLOCK_D)
    v_d = tl.arange(0, BLOCK_V)
    head = kv_head * GROUP + m % GROUP
    has_d, has_value = (d < HEAD_DIM)[None, :], (v_d < VALUE_DIM)[None, :]
    for work in range(tl.program_id(0), tl.load(num_tiles_ptr), tl.num_programs(0)):
        fields = tiles_ptr + work * FIELDS
        first = tl.load(fields)
        end = first + tl.load(fields + 1)
        if starts_ptr is not None:  # the rows may have more queries than a tile takes
            first, end = tl.load(starts_ptr + first), tl.load(starts_ptr + end)
        start_token = tl.load(fields + 2)
        end_token = tl.load(fields + 3)
        part = tl.load(fields + 4)
        for query in range(first, end, BLOCK_M // GROUP):
            queries = tl.minimum(end - query, BLOCK_M // GROUP) * GROUP
            row = tl.load(order_ptr + query + m // GROUP, mask=m < queries, other=0)
            q_mask = (m < queries)[:, None] & has_d
            q = tl.load(q_ptr + row[:, None] * q_stride + head[:, None] * HEAD_DIM + d[None, :], mask=q_mask, other=0.0)
            table = block_tables_ptr + tl.load(order_ptr + query) * table_stride
            top = tl.full([BLOCK_M], -1e30, tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
            if slopes_ptr is not None:
                slopes = load_slopes(slopes_ptr, head, True)
                position = tl.load(context_lens_ptr + row) - 1
            for start in range(start_token, end_token, TILE):
                key = first_numbers(table, start, n, kv_head, KV_HEADS, STRIDE, BLOCK_SIZE)[:, None]
                k_ptrs, v_ptrs = k_cache_ptr + (key + d[None, :]), v_cache_ptr + (key + v_d[None, :])
                bias = None
                if slopes_ptr is not None:
                    bias = bias_in_log2(slopes[:, None], (start + n)[None, :], position[:, None])
                acc, total, top = attend_to_tile(
                    q, k_ptrs, has_d, v_ptrs, has_value, None, bias, factor, CAP, acc, total, top
                )
            if IN_FP8:
                acc *= tl.load(kv_scales_ptr + 1)
            place = (part * rows + row) * (KV_HEADS * GROUP) + head
            results = results_ptr + place.to(tl.int64)[:, None] * VALUE_DIM + v_d[None, :]
            tl.store(results, acc / total[:, None], mask=(m < queries)[:, None] & has_value)
            tl.store(lse_ptr + place, top + tl.log2(total), mask=m < queries)


def add_shared_results(own: Tensor, own_lse: Tensor, shared: SharedResults, dtype: torch.dtype) -> Tensor:
    """Put these results together with those of the rows' own keys, in one launch.

    own, own_lse: [rows, heads, head_dim] and [rows, heads], as in SharedResults
    Returns [rows, heads, head_dim] of `dtype`.
    """
    rows, heads, head_dim = own.shape
    out = torch.empty(own.shape, dtype=dtype, device=own.device)
    block_d = next_power_of_2(head_dim)
    block_h = max(1, BLOCK_NUMBERS // block_d)
    _add_shared_kernel[(rows, cdiv(heads, block_h))](
        own,
        own_lse,
        *shared,
        out,
        rows,
        HEADS=heads,
        HEAD_DIM=head_dim,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        num_warps=4,
        **launch_options(own),
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _add_shared_kernel(
    own_ptr,
    own_lse_ptr,
    results_ptr,
    lse_ptr,
    num_parts_ptr,
    out_ptr,
    rows,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)[None, :]
    is_head = h < HEADS
    mask = is_head[:, None] & (d < HEAD_DIM)
    num_parts = load_complete(num_parts_ptr + row)
    wait_for_predecessor(EARLY)

    place = row.to(tl.int64) * HEADS + h
    numbers = place[:, None] * HEAD_DIM + d
    top = tl.load(own_lse_ptr + place, mask=is_head, other=0.0)
    acc = tl.load(own_ptr + numbers, mask=mask, other=0.0)
    total = tl.full([BLOCK_H], 1.0, tl.float32)
    for _ in range(num_parts):
        lse = tl.load(lse_ptr + place, mask=is_head, other=0.0)
        result = tl.load(results_ptr + place[:, None] * HEAD_DIM + d, mask=mask, other=0.0)
        new_top = tl.maximum(top, lse)
        weight, rescale = tl.exp2(lse - new_top), tl.exp2(top - new_top)
        acc = acc * rescale[:, None] + result * weight[:, None]
        total = total * rescale + weight
        top = new_top
        place += rows * HEADS
    tl.store(out_ptr + numbers, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
