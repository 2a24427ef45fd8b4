"""The kernels that compute Mamba2 in chunks: of a chunk alone, of a stretch's end, and from chunk to chunk."""

from __future__ import annotations

import triton
import triton.language as tl

from nanoinfer.kernels.delta.terms import decay_of
from nanoinfer.kernels.mamba.terms import step_of
from nanoinfer.kernels.states.matrices import load_matrix
from nanoinfer.kernels.states.tails import store_tail


@triton.jit(do_not_specialize=["least", "most"])
def look_within_kernel(
    xbc_ptr,
    dt_ptr,
    log_decay_ptr,
    dt_bias_ptr,
    cu_lens_ptr,
    seqs_ptr,
    first_tokens_ptr,
    squares_ptr,
    factors_ptr,
    xbc_stride,
    dt_stride,
    least,
    most,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    NUMBERS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Write of a chunk and a group: C B^T of all pairs of tokens; of each head, the decays up to a token, and its step.

    The decays are logarithms, summed from the chunk's beginning.
    """
    chunk, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    TOGETHER: tl.constexpr = HEADS // GROUPS
    t, n = tl.arange(0, TOKENS), tl.arange(0, BLOCK_N)
    first = tl.load(first_tokens_ptr + chunk).to(tl.int64)
    is_token = t < tl.load(cu_lens_ptr + tl.load(seqs_ptr + chunk) + 1) - first
    places = xbc_ptr + (first + t[:, None]) * xbc_stride + HEADS * DIM + group * NUMBERS + n
    mask = is_token[:, None] & (n < NUMBERS)
    b = tl.load(places, mask=mask, other=0.0)
    c = tl.load(places + GROUPS * NUMBERS, mask=mask, other=0.0)
    square = (chunk * GROUPS + group) * (TOKENS * TOKENS) + (t[:, None] * TOKENS + t)
    tl.store(squares_ptr + square, tl.dot(c, tl.trans(b), input_precision="ieee").to(c.dtype))
    for start in range(0, TOGETHER, BLOCK_H):
        h = start + tl.arange(0, BLOCK_H)
        has_h, head = h < TOGETHER, group * TOGETHER + h
        log_decay = tl.load(log_decay_ptr + head, mask=has_h, other=0.0)
        dt_bias = tl.load(dt_bias_ptr + head, mask=has_h, other=0.0)
        dt_ptrs = dt_ptr + (first + t[:, None]) * dt_stride + head
        dt = tl.load(dt_ptrs, mask=is_token[:, None] & has_h, other=0.0)
        step, decay = step_of(dt, log_decay, dt_bias, least, most)
        total = tl.cumsum(tl.where(is_token[:, None], decay, 0.0), axis=0)
        rows = factors_ptr + (chunk * HEADS + head) * 2 * TOKENS + t[:, None]
        tl.store(rows, total, mask=has_h[None, :])
        tl.store(rows + TOKENS, step, mask=has_h[None, :])


@triton.jit
def sum_stretch_kernel(
    xbc_ptr,
    factors_ptr,
    matrices_ptr,
    sums_ptr,
    cu_lens_ptr,
    seqs_ptr,
    first_tokens_ptr,
    stretches_ptr,
    standing_ptr,
    xbc_stride,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    NUMBERS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Write what a stretch adds to the state before the next one, and for a sequence's first stretch its initial state.

    So no program that walks one of several stretches reads a slot that another one writes.
    """
    part, head, stretch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    chunk = tl.load(stretches_ptr + stretch).to(tl.int64)
    seq, first = tl.load(seqs_ptr + chunk), tl.load(first_tokens_ptr + chunk).to(tl.int64)
    t, n, d = tl.arange(0, TOKENS), tl.arange(0, BLOCK_N), part * BLOCK_D + tl.arange(0, BLOCK_D)
    has_n, has_d = n < NUMBERS, d < DIM
    matrix, mask = (head * NUMBERS + n[:, None]) * DIM + d, has_n[:, None] & has_d
    MATRICES: tl.constexpr = HEADS * DIM * NUMBERS
    if first == tl.load(cu_lens_ptr + seq):
        state = load_matrix(matrices_ptr, tl.load(standing_ptr + seq).to(tl.int64), matrix, mask, MATRICES)
        tl.store(sums_ptr + stretch * MATRICES + matrix, state, mask=mask)
    if first + CHUNKS * TOKENS < tl.load(cu_lens_ptr + seq + 1):
        x_places = t[:, None] * xbc_stride + head * DIM + d
        b_places = t[:, None] * xbc_stride + HEADS * DIM + head // (HEADS // GROUPS) * NUMBERS + n
        state = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        for i in range(CHUNKS):
            tokens_ptr = xbc_ptr + (first + i * TOKENS) * xbc_stride
            rows = factors_ptr + ((chunk + i) * HEADS + head) * 2 * TOKENS
            x = tl.load(tokens_ptr + x_places, mask=has_d[None, :], other=0.0)
            b = tl.load(tokens_ptr + b_places, mask=has_n[None, :], other=0.0)
            state = take_in(state, x, b, rows, t, TOKENS)
        tl.store(sums_ptr + (stretch + 1) * MATRICES + matrix, state, mask=mask)


@triton.jit
def take_in(state, x, b, rows, t, TOKENS: tl.constexpr):
    """Return the state, [numbers, inputs], behind a chunk's tokens; rows: the factors of a chunk's head."""
    total, step, last = tl.load(rows + t), tl.load(rows + TOKENS + t), tl.load(rows + TOKENS - 1)
    taken = (x.to(tl.float32) * (step * tl.exp(last - total))[:, None]).to(x.dtype)
    return tl.dot(tl.trans(b), taken, state * decay_of(last), input_precision="ieee")


@triton.jit(do_not_specialize=["summed"])
def walk_stretch_kernel(
    xbc_ptr,
    squares_ptr,
    factors_ptr,
    skips_ptr,
    sums_ptr,
    matrices_ptr,
    keys_ptr,
    updates_ptr,
    decays_ptr,
    cu_lens_ptr,
    seqs_ptr,
    first_tokens_ptr,
    starts_ptr,
    stretches_ptr,
    standing_ptr,
    final_ptr,
    snapshots_ptr,
    out_ptr,
    summed,
    xbc_stride,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    NUMBERS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNKS: tl.constexpr,
    RING: tl.constexpr,
    DIVIDED: tl.constexpr,
):
    """Write the results of a stretch's tokens, and the states behind it.

    summed: of so many stretches, the first ones, sums_ptr has what sum_stretch_kernel writes; DIVIDED: of some
    """
    part, head, stretch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_chunk = tl.load(stretches_ptr + stretch).to(tl.int64)
    seq = tl.load(seqs_ptr + first_chunk)
    begin, end = tl.load(first_tokens_ptr + first_chunk).to(tl.int64), tl.load(cu_lens_ptr + seq + 1).to(tl.int64)
    t, n, d = tl.arange(0, TOKENS), tl.arange(0, BLOCK_N), part * BLOCK_D + tl.arange(0, BLOCK_D)
    has_n, has_d = n < NUMBERS, d < DIM
    matrix = (head * NUMBERS + n[:, None]) * DIM + d
    matrix_mask = has_n[:, None] & has_d
    MATRICES: tl.constexpr = HEADS * DIM * NUMBERS
    if DIVIDED:
        before = ((begin - tl.load(cu_lens_ptr + seq)) // (TOKENS * CHUNKS)).to(tl.int32)
        if stretch < summed:
            state = tl.load(sums_ptr + (stretch - before).to(tl.int64) * MATRICES + matrix, mask=matrix_mask, other=0.0)
        else:
            state = load_matrix(matrices_ptr, tl.load(standing_ptr + seq).to(tl.int64), matrix, matrix_mask, MATRICES)
        for i in range(before):
            rows = factors_ptr + ((first_chunk - (before - i) * CHUNKS) * HEADS + head) * 2 * TOKENS
            sum_ptrs = sums_ptr + (stretch - before + i + 1).to(tl.int64) * MATRICES + matrix
            state *= _decay_of_stretch(rows, HEADS, TOKENS, CHUNKS)
            state += tl.load(sum_ptrs, mask=matrix_mask, other=0.0)
    else:
        state = load_matrix(matrices_ptr, tl.load(standing_ptr + seq).to(tl.int64), matrix, matrix_mask, MATRICES)
    TOGETHER: tl.constexpr = HEADS // GROUPS
    group, final = head // TOGETHER, tl.load(final_ptr + seq).to(tl.int64)
    skip = tl.load(skips_ptr + head).to(tl.float32)
    x_places = t[:, None] * xbc_stride + head * DIM + d
    b_places = t[:, None] * xbc_stride + HEADS * DIM + group * NUMBERS + n
    out_places = (t[:, None] * HEADS + head) * DIM + d
    places, masks = (x_places, b_places, b_places + GROUPS * NUMBERS, out_places), (has_n, has_d)
    whole = tl.minimum((end - begin) // TOKENS, CHUNKS).to(tl.int32)

    for i in range(whole):
        first, chunk = begin + i * TOKENS, first_chunk + i
        snapshot = tl.load(snapshots_ptr + chunk).to(tl.int64)
        rows = factors_ptr + (chunk * HEADS + head) * 2 * TOKENS
        square = (chunk * GROUPS + group) * (TOKENS * TOKENS) + (t[:, None] * TOKENS + t)
        ptrs = xbc_ptr + first * xbc_stride, out_ptr + first * (HEADS * DIM), rows, squares_ptr + square
        is_token = (t < TOKENS)[:, None]
        x, b = _answer(state, ptrs, places, skip, t, is_token, masks, TOKENS)
        state = take_in(state, x, b, rows, t, TOKENS)
        if snapshot >= 0:
            snapshot_ptrs = matrices_ptr + snapshot * MATRICES + matrix
            tl.store(snapshot_ptrs, state.to(matrices_ptr.dtype.element_ty), mask=matrix_mask)
    first, chunk = begin + whole * TOKENS, first_chunk + whole
    if (final >= 0) & (end - first < TOKENS):
        final_ptrs = matrices_ptr + final * MATRICES + matrix
        tl.store(final_ptrs, state.to(matrices_ptr.dtype.element_ty), mask=matrix_mask)

    if (whole < CHUNKS) & (first < end):
        rows = factors_ptr + (chunk * HEADS + head) * 2 * TOKENS
        square = (chunk * GROUPS + group) * (TOKENS * TOKENS) + (t[:, None] * TOKENS + t)
        ptrs, is_token = (
            (xbc_ptr + first * xbc_stride, out_ptr + first * (HEADS * DIM), rows, squares_ptr + square),
            t < end - first,
        )
        x, b = _answer(state, ptrs, places, skip, t, is_token[:, None], masks, TOKENS)
        if final >= 0:
            position = tl.load(starts_ptr + seq) + (first - tl.load(cu_lens_ptr + seq)) + t
            memory, counts = (matrices_ptr, keys_ptr, updates_ptr, decays_ptr), (GROUPS, HEADS, NUMBERS, DIM)
            tail = b, x.to(tl.float32) * tl.load(rows + TOKENS + t)[:, None], tl.load(rows + t)
            is_first = (head % TOGETHER == 0) & (part == 0)
            store_tail(memory, final, position, is_token, tail, (group, head), (is_first, n, d), counts, RING)


@triton.jit
def _answer(state, ptrs, places, skip, t, is_token, masks, TOKENS: tl.constexpr):
    """Write what a chunk's tokens are answered; returns their x and B. All as for `answer`.

    ptrs: to results, too, behind the first; places: of results, too, behind the others
    """
    tokens_ptr, out_ptr, rows, square_ptrs = ptrs
    x_places, b_places, c_places, out_places = places
    ptrs, places = (tokens_ptr, rows, square_ptrs), (x_places, b_places, c_places)
    x, b, out = answer(state, ptrs, places, skip, t, is_token, masks, TOKENS)
    tl.store(out_ptr + out_places, out.to(out_ptr.dtype.element_ty), mask=is_token & masks[1])
    return x, b


@triton.jit
def answer(state, ptrs, places, skip, t, is_token, masks, TOKENS: tl.constexpr):
    """Return a chunk's x and B, and what its tokens are answered.

    ptrs: to the first token's numbers, the factors of the chunk's head, and the products of its group
    places: of x, B and C behind the first; is_token: [tokens, 1]; masks: which numbers and which inputs there are
    """
    tokens_ptr, rows, square_ptrs = ptrs
    x_places, b_places, c_places = places
    has_n, has_d = masks
    total, step = tl.load(rows + t), tl.load(rows + TOKENS + t)
    scores = tl.load(square_ptrs)
    x = tl.load(tokens_ptr + x_places, mask=is_token & has_d, other=0.0)
    c = tl.load(tokens_ptr + c_places, mask=is_token & has_n, other=0.0)
    b = tl.load(tokens_ptr + b_places, mask=is_token & has_n, other=0.0)
    between = tl.exp(tl.where(t[:, None] >= t, total[:, None] - total, float("-inf"))) * step
    out = tl.dot(c, state.to(c.dtype), input_precision="ieee") * tl.exp(total)[:, None]
    out = tl.dot((scores * between).to(x.dtype), x, out, input_precision="ieee") + skip * x.to(tl.float32)
    return x, b, out


@triton.jit
def _decay_of_stretch(rows, HEADS: tl.constexpr, TOKENS: tl.constexpr, CHUNKS: tl.constexpr):
    """Return what a head's state keeps over a stretch; rows: the factors of its first chunk's head."""
    lasts = tl.load(rows + tl.arange(0, CHUNKS) * (HEADS * 2 * TOKENS) + TOKENS - 1)
    return decay_of(tl.sum(lasts, axis=0))
