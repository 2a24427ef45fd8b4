"""The gated delta rule with one order of sums: each step computes a token with its chunk, as a prompt does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.delta.prefill import answer, look_within, shape_of, stages_of, terms_of, warps_of
from nanoinfer.kernels.delta.terms import decay_of
from nanoinfer.kernels.launch import cdiv, next_power_of_2
from nanoinfer.kernels.states.in_order import COLUMNS, Spans, TokenRings, load_span, place_of
from nanoinfer.kernels.states.matrices import load_matrix, store_matrix
from nanoinfer.kernels.states.order_check import TOKENS, check_order

VALUES = 64  # of a head that a program has, whatever a step's sequences and a rank's heads are


def delta_in_order(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    log_decay: Tensor,
    dt_bias: Tensor,
    rings: TokenRings,
    spans: Spans,
    largest: float = 1.0,
) -> Tensor:
    """Compute delta_rows' recurrence for each token of a step; a token's bits depend on those before it alone.

    qkv: [tokens, channels], convolved already; a, b: [tokens, value heads]; the others: as for delta_rows
    Returns [tokens, value heads, value dim] in qkv's dtype; what empty places get has no meaning.
    """
    heads, key_dim, value_dim = rings.matrices.shape[1:]
    out = torch.empty((len(qkv), heads, value_dim), dtype=qkv.dtype, device=qkv.device)
    tokens, gates = spans.gather(rings, qkv, torch.cat([a, b], dim=1))
    key_heads = (tokens.shape[1] - heads * value_dim) // (2 * key_dim)
    shape = shape_of(key_heads, heads, key_dim, value_dim)
    terms = tokens, *gates.split([heads, heads], dim=1)
    squares, factors = look_within(terms, (log_decay, dt_bias), spans.cuts, shape, largest)
    values = max(16, min(VALUES, next_power_of_2(value_dim)))
    _walk_delta_kernel[(cdiv(value_dim, values), heads, len(spans.seqs))](
        tokens,
        *squares,
        factors,
        rings.matrices,
        spans.first_tokens,
        spans.snapshots,
        spans.seqs,
        out,
        tokens.stride(0),
        **shape,
        COLUMNS=COLUMNS,
        BLOCK_V=values,
        num_warps=warps_of(qkv),
        num_stages=stages_of(shape["BLOCK_K"], values, qkv),
        enable_fp_fusion=True,
    )
    return out


@cache
def check_delta(
    key_heads: int, heads: int, key_dim: int, value_dim: int, largest: float, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise ValueError as check_order does, for layers of these sizes; largest: as for delta_rows"""
    generator = torch.Generator(device).manual_seed(0)
    sizes = 2 * key_heads * key_dim + heads * value_dim, heads, heads
    terms = [torch.randn(TOKENS, size, generator=generator, device=device).to(dtype) for size in sizes]
    log_decay, dt_bias = torch.rand(2, heads, generator=generator, device=device)

    def compute(terms: Sequence[Tensor], rings: TokenRings, spans: Spans) -> Tensor:
        qkv, a, b = terms
        return delta_in_order(qkv, a, b, log_decay, dt_bias, rings, spans, largest)

    check_order(compute, terms, (heads, key_dim, value_dim), 2 * heads)


@triton.jit
def _walk_delta_kernel(
    tokens_ptr,
    solutions_ptr,
    scores_ptr,
    factors_ptr,
    matrices_ptr,
    first_tokens_ptr,
    snapshots_ptr,
    seqs_ptr,
    out_ptr,
    stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Go through a sequence's chunks, all in the same way, whether they are whole; write its own tokens' results."""
    part, head, seq_ptr = tl.program_id(0), tl.program_id(1), seqs_ptr + tl.program_id(2) * COLUMNS
    (first_chunk, total, known, old), standing, final = load_span(seq_ptr)
    t, d, v = tl.arange(0, TOKENS), tl.arange(0, BLOCK_K), part * BLOCK_V + tl.arange(0, BLOCK_V)
    has_k, has_v = d < KEY_DIM, v < VALUE_DIM
    matrix, mask = (head * KEY_DIM + d[:, None]) * VALUE_DIM + v, has_k[:, None] & has_v
    MATRICES: tl.constexpr = VALUE_HEADS * KEY_DIM * VALUE_DIM
    state = load_matrix(matrices_ptr, standing, matrix, mask, MATRICES)
    q_places = t[:, None] * stride + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + d
    v_places = t[:, None] * stride + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + v
    for i in range(tl.cdiv(total, TOKENS)):
        chunk, token = first_chunk + i, i * TOKENS + t
        first = tl.load(first_tokens_ptr + chunk).to(tl.int64)
        chunk_head = chunk.to(tl.int64) * VALUE_HEADS + head
        within = terms_of(solutions_ptr, scores_ptr, factors_ptr, chunk_head, t, TOKENS)
        last = tl.load(factors_ptr + chunk_head * 4 * TOKENS + 4 * TOKENS - 1)
        is_token = (token < total)[:, None]
        places = q_places, q_places + KEY_HEADS * KEY_DIM, v_places
        k, updates, out = answer(state, tokens_ptr + first * stride, places, within, is_token, (has_k, has_v))
        place = place_of(seq_ptr, token - old).to(tl.int64)
        out_ptrs = out_ptr + (place[:, None] * VALUE_HEADS + head) * VALUE_DIM + v
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_token & (token >= old)[:, None] & has_v)
        updates = (updates * within[2][2][:, None]).to(k.dtype)
        new = tl.dot(tl.trans(k), updates, state * decay_of(last), input_precision="ieee")
        new = new.to(matrices_ptr.dtype.element_ty).to(tl.float32)  # as a later step would read it
        state = tl.where((i + 1) * TOKENS <= known, new, state)
        store_matrix(matrices_ptr, tl.load(snapshots_ptr + chunk).to(tl.int64), matrix, mask, state, MATRICES)
    store_matrix(matrices_ptr, final, matrix, mask, state, MATRICES)
