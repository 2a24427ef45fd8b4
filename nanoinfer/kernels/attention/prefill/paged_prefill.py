"""Causal attention of packed queries over the paged cache: prompts, chunks of prompts, cached prefixes."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.attention.fp8 import read
from nanoinfer.kernels.attention.scores import (
    Bias,
    attend_to_tile,
    bias_in_log2,
    explicit_attention,
    first_numbers,
    in_log2,
    load_sinks,
    load_slopes,
)
from nanoinfer.kernels.fp8 import FP8, as_bytes
from nanoinfer.kernels.launch import RESERVED_BYTES, cdiv, next_power_of_2, shared_memory

MANY_QUERIES = 4096  # queries of one sequence; from here on larger tiles are faster
MOST_TOGETHER = 4  # heads of a program
SCORES_AT_ONCE = 1 << 25  # of the reference, where heads share one of keys
QUERIES_AT_ONCE = 512  # the reference takes so many, where it computes a mask, so that this drops few scores


def paged_prefill_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_lens: list[int],
    context_lens: list[int],
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    kv_scales: Tensor | None = None,
    sinks: Tensor | None = None,
    ends: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """Attend from each sequence's new tokens, the last of its context, each to itself and the context before it.

    q: [tokens, heads, head_dim], the sequences' new tokens one after another; heads is a multiple of kv_heads
    k_cache, v_cache: [blocks, block_size, kv_heads, head_dim], the new tokens already written; a value may have another
        size than a key
    block_tables: [seqs, max blocks] int32
    query_lens, context_lens: how many new tokens each sequence has, and how many tokens in all
    window: how many keys a query sees, the last of them its own; blocks that no query sees are not read
    softcap: see explicit_attention
    kv_scales: [2] float32, the scale of the keys and that of the values in a cache of FP8 (see fp8.py)
    sinks: [heads] float32, a score of each query of the head beside the keys' (see scores.py); None: there are none
    ends: [tokens] int32, for each query the place behind the last key that it sees; None: that is its own
    slopes: [heads] float32, ALiBi's of the query heads (see scores.py); None: there are none
    Returns [tokens, heads, numbers of a value].
    """
    out = torch.empty((*q.shape[:2], v_cache.shape[3]), dtype=q.dtype, device=q.device)
    k_scale, v_scale = (None, None) if kv_scales is None else kv_scales
    begin = 0
    for table, query_len, context_len in zip(block_tables.tolist(), query_lens, context_lens, strict=True):
        has_mask = any(part is not None for part in (window, softcap, sinks, slopes)) or v_cache.shape[3] != q.shape[2]
        step = QUERIES_AT_ONCE if has_mask else query_len
        if k_cache.shape[2] == 1:  # scores are computed for all heads at once
            step = max(1, min(step, SCORES_AT_ONCE // (q.shape[1] * context_len)))
        for first in range(0, query_len, step):
            queries = min(step, query_len - first)
            tokens = slice(begin + first, begin + first + queries)
            stop = context_len - query_len + first + queries
            position = stop - queries
            start, mask = 0 if window is None else max(0, position + 1 - window), None
            if ends is not None:
                own = ends[tokens]
                stop = max(stop, int(own.max()))
                mask = _mask(own, position, range(start, stop), window)
            bias = None
            if slopes is not None:
                places = torch.arange(max(position + queries, stop), device=q.device)
                bias = Bias.of(slopes, places[position : position + queries], places[start:stop])
            k = read(_gather(k_cache, table, start, stop), q.dtype, k_scale).transpose(0, 1)
            v = read(_gather(v_cache, table, start, stop), q.dtype, v_scale).transpose(0, 1)
            out[tokens] = _attend_causally(q[tokens], k, v, scale, window, softcap, sinks, bias, mask)
        begin += query_len
    return out


def _gather(cache: Tensor, table: list[int], start: int, stop: int) -> Tensor:
    """Return the tokens from start to stop, [tokens, kv_heads, head_dim]; neighbouring blocks are not copied."""
    block_size = cache.shape[1]
    skipped = start // block_size
    blocks = table[skipped : math.ceil(stop / block_size)]
    first, last = blocks[0], blocks[-1] + 1
    are_neighbours = blocks == list(range(first, last))
    gathered = (cache[first:last] if are_neighbours else as_bytes(cache)[blocks].view(cache.dtype)).flatten(0, 1)
    return gathered[start - skipped * block_size : stop - skipped * block_size]


def _attend_causally(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    bias: Bias | None,
    mask: Tensor | None,
) -> Tensor:
    """Attend from the last tokens' queries; no token lies before the first query's window.

    q: [queries, heads, head_dim]; k, v: [kv_heads, tokens, head_dim], values may have another size; returns a value for
        each query head
    bias: with the slopes of all heads; None: there is none
    mask: [queries, tokens] bool, which tokens a query sees; None: those up to its own, within the window
    """
    (queries, heads, head_dim), (kv_heads, tokens) = q.shape, k.shape[:2]
    is_explicit = any(part is not None for part in (softcap, sinks, bias))
    if queries == 1:  # one KV head's query heads stand as its queries, so that no key is copied
        grouped = q.reshape(1, kv_heads, heads // kv_heads, head_dim)
        if is_explicit:
            of_heads = None if sinks is None else sinks.view(kv_heads, -1)
            if bias is not None:
                bias = Bias(bias.slopes.view(kv_heads, -1), bias.distances)
            attended = explicit_attention(grouped, k[None], v[None], None, scale, softcap, of_heads, bias)
        else:
            attended = F.scaled_dot_product_attention(grouped, k[None], v[None], scale=scale)
        return attended.reshape(1, heads, -1)
    if is_explicit:
        grouped = q.transpose(0, 1).reshape(kv_heads, -1, head_dim)
        seen = _causal_mask(queries, tokens, window, q.device) if mask is None else mask
        group = heads // kv_heads
        of_queries = None if sinks is None else sinks.repeat_interleave(queries).view(kv_heads, -1)
        if bias is not None:
            bias = Bias(bias.slopes.repeat_interleave(queries).view(kv_heads, -1), bias.distances.repeat(group, 1))
        attended = explicit_attention(grouped, k, v, seen.repeat(group, 1), scale, softcap, of_queries, bias)
        return attended.view(heads, queries, -1).transpose(0, 1)
    if mask is None and (queries < tokens or window is not None):
        mask = _causal_mask(queries, tokens, window, q.device)
    if kv_heads == 1 < heads and v.shape[2] < head_dim:  # of latents: torch would copy them for each query head
        own = q.transpose(0, 1).reshape(1, 1, -1, head_dim)
        seen = (_causal_mask(queries, tokens, window, q.device) if mask is None else mask).repeat(heads, 1)
        attended = F.scaled_dot_product_attention(own, k[None], v[None], seen, scale=scale)
        return attended.view(heads, queries, -1).transpose(0, 1)
    attended = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    return attended[0].transpose(0, 1)


def _causal_mask(queries: int, tokens: int, window: int | None, device: torch.device) -> Tensor:
    """Return [queries, tokens] bool, True where a query, one of the last tokens, sees a token."""
    seen = torch.ones(queries, tokens, dtype=torch.bool, device=device).tril(tokens - queries)
    return seen if window is None else seen.triu(tokens - queries + 1 - window)


def _mask(ends: Tensor, position: int, keys: range, window: int | None) -> Tensor:
    """Return [queries, keys] bool, True where a query sees a key; position: the first query's; ends: each query's"""
    places = torch.arange(keys.start, keys.stop, device=ends.device)
    seen = places < ends[:, None]
    if window is None:
        return seen
    return seen & (places > torch.arange(position, position + len(ends), device=ends.device)[:, None] - window)


def paged_prefill_triton(
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
    ends: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """paged_prefill_reference as one launch.

    cu_query_lens: [seqs + 1] int32, where each sequence's queries begin and the last one's end
    context_lens: [seqs] int32; 0: the kernel writes no result for the sequence's queries
    max_query_len: at least the most queries of a sequence that the kernel attends from
    """
    (tokens, heads, head_dim), value_dim = q.shape, v_cache.shape[3]
    _, block_size, kv_heads, _ = k_cache.shape
    out = torch.empty((tokens, heads, value_dim), dtype=q.dtype, device=q.device)
    if max_query_len == 0:
        return out
    factor, cap = in_log2(scale, softcap)
    tiles = choose_tiles(q, value_dim, max_query_len, heads // kv_heads)
    grid = (heads // tiles.heads * tiles.parts, cdiv(max_query_len, tiles.queries), len(context_lens))
    _paged_prefill_kernel[grid](
        q,
        k_cache,
        v_cache,
        block_tables,
        cu_query_lens,
        context_lens,
        out,
        kv_scales,
        sinks,
        ends,
        slopes,
        factor,
        q.stride(0),
        block_tables.stride(0),
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        K_STRIDE=k_cache.stride(2),
        V_STRIDE=v_cache.stride(2),
        BLOCK_SIZE=block_size,
        WINDOW=window or 0,
        CAP=cap,
        SINKS=sinks is not None,
        IN_FP8=k_cache.dtype == FP8,
        QUERIES=tiles.queries,
        HEADS=tiles.heads,
        BLOCK_N=math.gcd(block_size, tiles.keys),
        BLOCK_D=max(16, next_power_of_2(head_dim)),
        BLOCK_V=max(16, next_power_of_2(value_dim)),
        PARTS=tiles.parts,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        enable_fp_fusion=True,
    )
    return out


class Tiles(NamedTuple):
    """How the programs of a prefill run.

    queries: of a program; keys: that it reads at a time; stages: how many reads are on their way
    heads: of one KV head, whose queries a program has
    parts: how many programs share the numbers of a result, each with all scores: for more queries than the registers
        of one program have results for
    """

    queries: int
    keys: int
    warps: int
    stages: int
    heads: int = 1
    parts: int = 1


def choose_tiles(q: Tensor, value_dim: int, max_query_len: int, group: int) -> Tiles:
    """Return the tiles that are the fastest on an H200 or H100, if they fit.

    q, max_query_len: as for paged_prefill_triton; value_dim: numbers of a value; group: heads of a KV head
    """
    head_dim = next_power_of_2(max(q.shape[2], value_dim))
    if head_dim > 256:  # so many numbers of the results that more queries, or fewer warps, lack registers
        if q.dtype == torch.float32:
            return Tiles(16, 16, 8, 2)
        halves, large = Tiles(128, 32, 8, 2, parts=2), Tiles(64, 32, 8, 2)
        if max_query_len > 64 and fits(halves, q, value_dim):
            return halves
        return large if fits(large, q, value_dim) else Tiles(64, 16, 8, 2)
    if head_dim > 128 or q.dtype == torch.float32:
        small, large, is_long = Tiles(64, 32, 4, 2), Tiles(128, 64, 8, 2), max_query_len > 64
        if q.dtype == torch.float32 and head_dim > 128:
            return Tiles(32, 16, 8, 2)
    else:
        # Heads that share keys waste less at the diagonal, where a tile of queries sees a part of a tile of keys.
        together = math.gcd(group, MOST_TOGETHER)
        small = Tiles(64, 64, 4, 3) if together == 1 else Tiles(64 // together, 32, 4, 2, together)
        large, is_long = Tiles(128, 128, 8, 3), max_query_len >= MANY_QUERIES and head_dim == 128
    return large if is_long and fits(large, q, value_dim) and q.dtype != torch.float32 else small


def fits(tiles: Tiles, q: Tensor, value_dim: int) -> bool:
    """Return whether a program has shared memory for its queries, and for two tiles of keys and two of values."""
    block_d = next_power_of_2(max(q.shape[2], value_dim))
    numbers = (tiles.queries * tiles.heads + 2 * tiles.keys) * block_d + 2 * tiles.keys * block_d // tiles.parts
    return numbers * q.itemsize + RESERVED_BYTES <= shared_memory(q.device)


@triton.jit
def _paged_prefill_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    cu_query_lens_ptr,
    context_lens_ptr,
    out_ptr,
    kv_scales_ptr,
    sinks_ptr,
    ends_ptr,
    slopes_ptr,
    factor,
    q_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    SINKS: tl.constexpr,
    IN_FP8: tl.constexpr,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PARTS: tl.constexpr,
):
    # The programs with the most keys come first. The heads that share a KV head run side by side.
    first_head, tile, seq = (
        tl.program_id(0) // PARTS * HEADS,
        tl.num_programs(1) - 1 - tl.program_id(1),
        tl.program_id(2),
    )
    begin = tl.load(cu_query_lens_ptr + seq)
    query_len = tl.load(cu_query_lens_ptr + seq + 1) - begin
    context_len = tl.load(context_lens_ptr + seq)
    if (tile * QUERIES < query_len) & (context_len > 0):
        BLOCK_M: tl.constexpr = QUERIES * HEADS  # lanes: all queries of a head, then those of the next
        lane = tl.arange(0, BLOCK_M)
        m, head = tile * QUERIES + lane % QUERIES, first_head + lane // QUERIES
        n = tl.arange(0, BLOCK_N)
        d = tl.arange(0, BLOCK_D)
        own_d = tl.program_id(0) % PARTS * (BLOCK_V // PARTS) + tl.arange(0, BLOCK_V // PARTS)  # of the results
        q_mask = (m < query_len)[:, None] & (d < HEAD_DIM)[None, :]
        token = (begin + m).to(tl.int64)[:, None]
        q = tl.load(q_ptr + token * q_stride + head[:, None] * HEAD_DIM + d[None, :], mask=q_mask, other=0.0)
        table = block_tables_ptr + seq * table_stride
        position = context_len - query_len + m  # of each query in its sequence
        first_position = context_len - query_len + tile * QUERIES
        end = tl.minimum(context_len, first_position + QUERIES)
        last = position  # the last key that each query sees
        if ends_ptr is not None:
            last = tl.load(ends_ptr + begin + m, mask=m < query_len, other=0) - 1
            end = tl.max(last) + 1
        # All queries see the keys from `full` to `full_end`, whole tiles of keys. Those before and after need a mask.
        first_key, full, full_end = 0, 0, (first_position + 1) // BLOCK_N * BLOCK_N
        if WINDOW > 0:
            first_key = tl.maximum(first_position + 1 - WINDOW, 0)
            full = tl.minimum(tl.cdiv(tl.maximum(first_position + QUERIES - WINDOW, 0), BLOCK_N) * BLOCK_N, full_end)
        if IN_FP8:
            factor *= tl.load(kv_scales_ptr)
        top = tl.full([BLOCK_M], -1e30, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if SINKS:
            top, total = tl.zeros([BLOCK_M], tl.float32) + load_sinks(sinks_ptr, head, True), total + 1.0
        if slopes_ptr is not None:
            slopes = load_slopes(slopes_ptr, head, True)
        acc = tl.zeros([BLOCK_M, BLOCK_V // PARTS], tl.float32)
        for part in tl.static_range(0 if WINDOW > 0 else 1, 3):
            part_begin = first_key // BLOCK_N * BLOCK_N if part == 0 else full if part == 1 else full_end
            part_end = full if part == 0 else full_end if part == 1 else end
            for start in range(part_begin, part_end, BLOCK_N):
                # BLOCK_N divides BLOCK_SIZE: a tile of keys lies in one block.
                key = first_numbers(table, start, n, first_head // GROUP, KV_HEADS, K_STRIDE, BLOCK_SIZE)[:, None]
                value = key
                if V_STRIDE != K_STRIDE:  # of latents' prompts alone
                    value = first_numbers(table, start, n, first_head // GROUP, KV_HEADS, V_STRIDE, BLOCK_SIZE)[:, None]
                k_mask, v_mask, seen = (d < HEAD_DIM)[None, :], (own_d < VALUE_DIM)[None, :], None
                bias = None
                if part != 1:
                    is_there = ((start + n >= first_key) & (start + n < context_len))[:, None]
                    k_mask, v_mask = k_mask & is_there, v_mask & is_there
                    seen = (start + n)[None, :] <= last[:, None]
                    if WINDOW > 0:
                        seen &= (start + n)[None, :] > position[:, None] - WINDOW
                k_ptrs, v_ptrs = k_cache_ptr + key + d[None, :], v_cache_ptr + value + own_d[None, :]
                if slopes_ptr is not None:
                    bias = bias_in_log2(slopes[:, None], (start + n)[None, :], position[:, None])
                acc, total, top = attend_to_tile(
                    q, k_ptrs, k_mask, v_ptrs, v_mask, seen, bias, factor, CAP, acc, total, top
                )
        if IN_FP8:
            acc *= tl.load(kv_scales_ptr + 1)
        out = out_ptr + token * (KV_HEADS * GROUP * VALUE_DIM) + head[:, None] * VALUE_DIM + own_d[None, :]
        out_mask = (m < query_len)[:, None] & (own_d < VALUE_DIM)[None, :]
        tl.store(out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=out_mask)
