"""Mamba2 with one order of sums: each step computes a token with its chunk, as a prompt does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import cdiv
from nanoinfer.kernels.mamba.chunks import answer, take_in
from nanoinfer.kernels.mamba.prefill import look_within, shape_of, tile_of
from nanoinfer.kernels.states.in_order import COLUMNS, Spans, TokenRings, load_span, place_of
from nanoinfer.kernels.states.matrices import load_matrix, store_matrix
from nanoinfer.kernels.states.order_check import TOKENS, check_order


def mamba_in_order(
    xbc: Tensor,
    dt: Tensor,
    log_decay: Tensor,
    dt_bias: Tensor,
    skips: Tensor,
    rings: TokenRings,
    spans: Spans,
    limits: tuple[float, float],
) -> Tensor:
    """Compute mamba_rows' recurrence for each token of a step; a token's bits depend on those before it alone.

    xbc: [tokens, channels], convolved already; dt: [tokens, heads]; the others: as for mamba_rows
    Returns [tokens, heads, dim] in xbc's dtype; what empty places get has no meaning.
    """
    heads, numbers, dim = rings.matrices.shape[1:]
    out = torch.empty((len(xbc), heads, dim), dtype=xbc.dtype, device=xbc.device)
    tokens, gates = spans.gather(rings, xbc, dt)
    groups = (tokens.shape[1] - heads * dim) // (2 * numbers)
    shape = shape_of(groups, heads, numbers, dim)
    tile = tile_of(shape["BLOCK_N"], dim, xbc)
    squares, factors = look_within((tokens, gates), (log_decay, dt_bias), spans.cuts, shape, limits)
    _walk_mamba_kernel[(cdiv(dim, tile.inputs), heads, len(spans.seqs))](
        tokens,
        squares,
        factors,
        skips,
        rings.matrices,
        spans.first_tokens,
        spans.snapshots,
        spans.seqs,
        out,
        tokens.stride(0),
        **shape,
        COLUMNS=COLUMNS,
        BLOCK_D=tile.inputs,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=True,
    )
    return out


@cache
def check_mamba(groups: int, heads: int, numbers: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError as check_order does, for layers of these sizes."""
    generator = torch.Generator(device).manual_seed(0)
    sizes = heads * dim + 2 * groups * numbers, heads
    terms = [torch.randn(TOKENS, size, generator=generator, device=device).to(dtype) for size in sizes]
    log_decay, dt_bias, skips = torch.rand(3, heads, generator=generator, device=device)

    def compute(terms: Sequence[Tensor], rings: TokenRings, spans: Spans) -> Tensor:
        xbc, dt = terms
        return mamba_in_order(xbc, dt, log_decay, dt_bias, skips, rings, spans, (0.0, math.inf))

    check_order(compute, terms, (heads, numbers, dim), heads)


@triton.jit
def _walk_mamba_kernel(
    tokens_ptr,
    squares_ptr,
    factors_ptr,
    skips_ptr,
    matrices_ptr,
    first_tokens_ptr,
    snapshots_ptr,
    seqs_ptr,
    out_ptr,
    stride,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    NUMBERS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Go through a sequence's chunks, all in the same way, whether they are whole; write its own tokens' results."""
    part, head, seq_ptr = tl.program_id(0), tl.program_id(1), seqs_ptr + tl.program_id(2) * COLUMNS
    (first_chunk, total, known, old), standing, final = load_span(seq_ptr)
    t, n, d = tl.arange(0, TOKENS), tl.arange(0, BLOCK_N), part * BLOCK_D + tl.arange(0, BLOCK_D)
    has_n, has_d = n < NUMBERS, d < DIM
    matrix, mask = (head * NUMBERS + n[:, None]) * DIM + d, has_n[:, None] & has_d
    MATRICES: tl.constexpr = HEADS * DIM * NUMBERS
    state = load_matrix(matrices_ptr, standing, matrix, mask, MATRICES)
    group, skip = head // (HEADS // GROUPS), tl.load(skips_ptr + head).to(tl.float32)
    b_places = t[:, None] * stride + HEADS * DIM + group * NUMBERS + n
    places = t[:, None] * stride + head * DIM + d, b_places, b_places + GROUPS * NUMBERS
    for i in range(tl.cdiv(total, TOKENS)):
        chunk, token = (first_chunk + i).to(tl.int64), i * TOKENS + t
        first = tl.load(first_tokens_ptr + chunk).to(tl.int64)
        rows = factors_ptr + (chunk * HEADS + head) * 2 * TOKENS
        square = (chunk * GROUPS + group) * (TOKENS * TOKENS) + (t[:, None] * TOKENS + t)
        ptrs, is_token = (tokens_ptr + first * stride, rows, squares_ptr + square), (token < total)[:, None]
        x, b, out = answer(state, ptrs, places, skip, t, is_token, (has_n, has_d), TOKENS)
        place = place_of(seq_ptr, token - old).to(tl.int64)
        out_ptrs = out_ptr + (place[:, None] * HEADS + head) * DIM + d
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_token & (token >= old)[:, None] & has_d)
        new = take_in(state, x, b, rows, t, TOKENS)
        new = new.to(matrices_ptr.dtype.element_ty).to(tl.float32)  # as a later step would read it
        state = tl.where((i + 1) * TOKENS <= known, new, state)
        store_matrix(matrices_ptr, tl.load(snapshots_ptr + chunk).to(tl.int64), matrix, mask, state, MATRICES)
    store_matrix(matrices_ptr, final, matrix, mask, state, MATRICES)
