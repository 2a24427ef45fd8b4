"""Decode attention to latents that several rows share: each is read once for many rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.attention.prefixes.prefix_plan import (
    TILE_FIELDS,
    TILE_QUERIES,
    SharedPrefixes,
    SharedQueries,
    max_parts,
)
from nanoinfer.kernels.attention.prefixes.shared_prefix import SharedResults
from nanoinfer.kernels.attention.scores import LOG2_E
from nanoinfer.kernels.fp8 import FP8
from nanoinfer.kernels.latent.decode import choose_programs, load_queries_of_latents, meet_tile, most_lanes
from nanoinfer.kernels.launch import launch_options, next_power_of_2, wait_for_predecessor


def attend_to_shared_latents(
    q: Tensor,
    cache: Tensor,
    latent: int,
    block_tables: Tensor,
    prefixes: SharedPrefixes,
    scale: float,
    kv_scales: Tensor | None = None,
    queries: SharedQueries | None = None,
) -> SharedResults:
    """Attend from each row's query to the tokens that other rows share, in one launch.

    Arguments as for meet_latents; queries: given if rows have several; then q and block_tables have a row for each
    """
    rows, heads, numbers = q.shape
    most_parts = max_parts(rows if queries is None else len(queries.starts) - 1)
    results = torch.empty((most_parts, rows, heads, latent), dtype=torch.float32, device=q.device)
    lse = torch.empty(results.shape[:3], dtype=torch.float32, device=q.device)
    lanes = max(heads, min(TILE_QUERIES, most_lanes(cache)))  # the rows of a tile of work may need several turns
    programs = choose_programs(rows, cache, latent, lanes)
    _shared_kernel[(prefixes.workers,)](
        q,
        cache,
        block_tables,
        prefixes.order if queries is None else queries.order,
        None if queries is None else queries.starts,
        prefixes.tiles,
        prefixes.num_tiles,
        results,
        lse,
        kv_scales,
        scale * LOG2_E.value,
        q.stride(0),
        block_tables.stride(0),
        rows,
        HEADS=heads,
        LATENT=latent,
        NUMBERS=numbers,
        BLOCK_SIZE=cache.shape[1],
        IN_FP8=cache.dtype == FP8,
        FIELDS=TILE_FIELDS,
        TILE=programs.tile,
        BLOCK_G=max(16, next_power_of_2(lanes)),
        BLOCK_D=max(16, next_power_of_2(latent)),
        BLOCK_REST=max(16, next_power_of_2(numbers - latent)),
        num_warps=programs.warps,
        num_stages=programs.stages,
        **launch_options(q),
    )
    return SharedResults(results, lse, prefixes.num_parts if queries is None else queries.num_parts)


@triton.jit(do_not_specialize=["rows"])
def _shared_kernel(
    q_ptr,
    cache_ptr,
    block_tables_ptr,
    order_ptr,
    starts_ptr,
    tiles_ptr,
    num_tiles_ptr,
    results_ptr,
    lse_ptr,
    kv_scales_ptr,
    factor,
    q_stride,
    table_stride,
    rows,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    NUMBERS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    IN_FP8: tl.constexpr,
    FIELDS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY)
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    for work in range(tl.program_id(0), tl.load(num_tiles_ptr), tl.num_programs(0)):
        fields = tiles_ptr + work * FIELDS
        first = tl.load(fields)
        end = first + tl.load(fields + 1)
        if starts_ptr is not None:  # the rows may have more queries than a tile takes
            first, end = tl.load(starts_ptr + first), tl.load(starts_ptr + end)
        start_token, end_token, part = tl.load(fields + 2), tl.load(fields + 3), tl.load(fields + 4)
        for query in range(first, end, BLOCK_G // HEADS):
            lanes = tl.minimum(end - query, BLOCK_G // HEADS) * HEADS
            is_query = g < lanes
            row = tl.load(order_ptr + query + g // HEADS, mask=is_query, other=0)
            q_ptrs = q_ptr + row * q_stride + g % HEADS * NUMBERS
            q, q_rest, unit = load_queries_of_latents(
                q_ptrs, is_query, factor, kv_scales_ptr, LATENT, NUMBERS, IN_FP8, BLOCK_D, BLOCK_REST
            )
            table = block_tables_ptr + tl.load(order_ptr + query) * table_stride
            top = tl.full([BLOCK_G], -1e30, tl.float32)
            total = tl.zeros([BLOCK_G], tl.float32)
            acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
            for start in range(start_token, end_token, TILE):
                acc, total, top = meet_tile(
                    q, q_rest, unit, cache_ptr, table, start, end_token, end_token, LATENT, NUMBERS, BLOCK_SIZE, TILE,
                    acc, total, top,
                )  # fmt: skip
            if IN_FP8:
                acc *= tl.load(kv_scales_ptr + 1)
            place = (part * rows + row) * HEADS + g % HEADS
            target = results_ptr + place.to(tl.int64)[:, None] * LATENT + d[None, :]
            tl.store(target, acc / total[:, None], mask=is_query[:, None] & (d < LATENT)[None, :])
            tl.store(lse_ptr + place, top + tl.log2(total), mask=is_query)
