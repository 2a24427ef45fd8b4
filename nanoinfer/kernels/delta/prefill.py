"""The gated delta rule for the tokens of a prefill step, in chunks."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.delta.chunks import CHUNK, Chunks, chunks_before
from nanoinfer.kernels.delta.inverse import invert, invert_reference
from nanoinfer.kernels.delta.terms import decay_of, gates, gates_of, keys_of, length_factor, split_heads
from nanoinfer.kernels.launch import cdiv, next_power_of_2, num_multiprocessors, shared_memory
from nanoinfer.kernels.states.fold import fold_tails
from nanoinfer.kernels.states.memory import Recurrence
from nanoinfer.kernels.states.tails import store_tail, write_tail

CHUNKS_AT_ONCE = 32  # of which the reference has the numbers in memory


def delta_chunks(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    log_decay: Tensor,
    dt_bias: Tensor,
    recurrence: Recurrence,
    chunks: Chunks,
    largest: float = 1.0,
) -> Tensor:
    """Compute delta_rows' recurrence for each token of a prefill step; write the states behind sequences and snapshots.

    Matrices get those behind the last whole chunk, and the tokens behind that stand beside them.

    qkv: [tokens, channels], convolved already; a, b: [tokens, value heads]
    log_decay, dt_bias, recurrence, largest: as for delta_rows
    Returns [tokens, value heads, value dim] in qkv's dtype.
    """
    if chunks.may_fold:
        fold_tails(recurrence, chunks)
    function = delta_chunks_triton if qkv.is_cuda else delta_chunks_reference
    return function(qkv, a, b, log_decay, dt_bias, recurrence, chunks, largest)


def delta_chunks_reference(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    log_decay: Tensor,
    dt_bias: Tensor,
    recurrence: Recurrence,
    chunks: Chunks,
    largest: float = 1.0,
) -> Tensor:
    """delta_chunks in torch, behind fold_tails."""
    matrices, heads, value_dim = recurrence.matrices, *recurrence.updates.shape[2:]
    tokens = chunks.first_tokens.unsqueeze(1) + torch.arange(CHUNK, device=qkv.device)
    is_token = tokens < chunks.cu_lens[chunks.seqs.long() + 1].unsqueeze(1)
    seqs, snapshots, final = chunks.seqs.tolist(), chunks.snapshots.tolist(), chunks.final.tolist()
    raw, factors = keys_of(qkv, recurrence.key_heads, heads, value_dim)
    out = torch.empty((len(qkv), heads, value_dim), dtype=qkv.dtype, device=qkv.device)
    for first in range(0, len(seqs), CHUNKS_AT_ONCE):
        group = slice(first, first + CHUNKS_AT_ONCE)
        mask = is_token[group]
        at = tokens[group].where(mask, 0).flatten()
        split = split_heads(qkv[at], recurrence.key_heads, heads, value_dim)
        terms = (*split, *gates(a[at], b[at], log_decay, dt_bias, largest))
        within = _look_within_reference(*(_by_chunk(x, mask) for x in terms))
        answers = torch.empty_like(within.updates)
        for i, chunk in enumerate(range(first, min(first + CHUNKS_AT_ONCE, len(seqs)))):
            seq = seqs[chunk]
            if chunk == 0 or seqs[chunk - 1] != seq:
                slot = int(chunks.standing[seq])
                state = matrices[slot].float() if slot >= 0 else torch.zeros_like(matrices[0], dtype=torch.float32)
            new = within.updates[i] - within.taken[i] @ state
            answers[i] = within.q[i] @ state + within.scores[i] @ new
            own = tokens[chunk][is_token[chunk]].long()
            if len(own) < CHUNK:
                updates = new[:, : len(own)].transpose(0, 1) * factors[own].unsqueeze(-1)
                total = within.total[i, :, : len(own), 0].T
                write_tail(recurrence, final[seq], chunks.end(seq), (raw[own], updates, total))
            else:
                state = state * within.decay[i] + within.k[i].mT @ new
            is_last = chunk + 1 == len(seqs) or seqs[chunk + 1] != seq
            for slot in (snapshots[chunk], final[seq] if is_last else -1):
                if slot >= 0:
                    matrices[slot] = state.to(matrices.dtype)
        out[tokens[group][mask]] = answers.transpose(1, 2)[mask].to(out.dtype)
    return out


def _by_chunk(x: Tensor, is_token: Tensor) -> Tensor:
    """Return what is [chunks * CHUNK, value heads, ...] as [chunks, value heads, CHUNK, dim]; 0 where no token is."""
    x = x.unflatten(0, is_token.shape).transpose(1, 2)
    x = x.unsqueeze(-1) if x.dim() == 3 else x
    return x.where(is_token[:, None, :, None], 0)


class _Within(NamedTuple):
    """What chunks have of themselves, all [chunks, value heads, ...].

    q, k: as they meet the state before the chunk, and behind it, [CHUNK, key dim]
    scores: of queries and updates, [CHUNK, CHUNK]
    updates: of values, behind a state of zeros, [CHUNK, value dim]; taken: off them for the state, [CHUNK, key dim]
    decay: of the state, [1, 1]; total: the logarithms of decays up to each token, [CHUNK, 1]
    """

    q: Tensor
    k: Tensor
    scores: Tensor
    updates: Tensor
    taken: Tensor
    decay: Tensor
    total: Tensor


def _look_within_reference(q: Tensor, k: Tensor, v: Tensor, log_decays: Tensor, strengths: Tensor) -> _Within:
    """Compute what does not depend on states, of numbers that are all [chunks, value heads, CHUNK, ...].

    Each token's update depends on those before it in the chunk: a triangular system, whose inverse gives them all. This
    is the chunked form of Yang et al. (2024).
    """
    total = log_decays.cumsum(dim=2)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    between = (total - total.mT).masked_fill(later, -torch.inf).exp()
    solutions = invert_reference((strengths * (k @ k.mT) * between).tril(-1))
    last = total[:, :, -1:]
    return _Within(
        q=q * total.exp(),
        k=k * (last - total).exp(),
        scores=(q @ k.mT) * between,
        updates=solutions @ (strengths * v),
        taken=solutions @ (strengths * total.exp() * k),
        decay=last.exp(),
        total=total,
    )


def delta_chunks_triton(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    log_decay: Tensor,
    dt_bias: Tensor,
    recurrence: Recurrence,
    chunks: Chunks,
    largest: float = 1.0,
) -> Tensor:
    """delta_chunks as two launches, behind fold_tails.

    The first one's programs have a chunk and a head each: what does not depend on the state. Those of the second have a
    sequence, a head and some of its values, and go from chunk to chunk.
    """
    value_heads, key_dim, value_dim = recurrence.matrices.shape[1:]
    shape = shape_of(recurrence.key_heads, value_heads, key_dim, value_dim)
    cuts = chunks.cu_lens, chunks.seqs, chunks.first_tokens
    within = look_within((qkv, a, b), (log_decay, dt_bias), cuts, shape, largest)
    return _go_through(qkv, *within, recurrence, chunks, shape)


def shape_of(key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> dict[str, int]:
    """Return the sizes that all kernels of chunks compile for."""
    return {
        "KEY_HEADS": key_heads,
        "VALUE_HEADS": value_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "TOKENS": CHUNK,
        "BLOCK_K": max(16, next_power_of_2(key_dim)),
    }


def look_within(
    terms: tuple[Tensor, Tensor, Tensor],
    gates: tuple[Tensor, Tensor],
    cuts: tuple[Tensor, Tensor, Tensor],
    shape: dict[str, int],
    largest: float,
) -> tuple[Tensor, Tensor]:
    """Launch the first kernel of delta_chunks_triton; returns its squares and factors.

    terms: qkv, a and b; gates: log_decay and dt_bias; cuts: cu_lens, seqs and first_tokens, as Chunks has them
    """
    (qkv, a, b), chunks, value_heads = terms, len(cuts[1]), shape["VALUE_HEADS"]
    squares = torch.empty((2, chunks, value_heads, CHUNK, CHUNK), dtype=qkv.dtype, device=qkv.device)
    factors = torch.empty((chunks, value_heads, 4, CHUNK), dtype=torch.float32, device=qkv.device)
    _look_within_kernel[(chunks, value_heads)](
        *terms,
        *gates,
        *cuts,
        *squares,
        factors,
        qkv.stride(0),
        a.stride(0),
        b.stride(0),
        LARGEST=largest,
        **shape,
        num_warps=warps_of(qkv),
        enable_fp_fusion=True,
    )
    return squares, factors


def _go_through(
    qkv: Tensor, squares: Tensor, factors: Tensor, recurrence: Recurrence, chunks: Chunks, shape: dict[str, int]
) -> Tensor:
    """Launch the second kernel of delta_chunks_triton; squares, factors: what the first one wrote."""
    seqs, (value_heads, value_dim) = len(chunks.starts), recurrence.updates.shape[2:]
    out = torch.empty((len(qkv), value_heads, value_dim), dtype=qkv.dtype, device=qkv.device)
    values = _values_at_once(seqs * value_heads, value_dim, qkv.device)
    if qkv.dtype != torch.float32 and stages_of(shape["BLOCK_K"], values, qkv) == 1:
        values = 64  # for an H100, Triton 3.6 compiles one stage of 32 values wrongly: it leaves its shared memory
    values = max(16, min(values, next_power_of_2(value_dim)))
    _go_through_kernel[(cdiv(value_dim, values), value_heads, seqs)](
        qkv,
        *squares,
        factors,
        *recurrence,
        chunks.cu_lens,
        chunks.starts,
        chunks.standing,
        chunks.final,
        chunks.seqs,
        chunks.snapshots,
        out,
        len(chunks.seqs),
        qkv.stride(0),
        **shape,
        RING=recurrence.ring,
        BLOCK_V=values,
        num_warps=warps_of(qkv),
        num_stages=stages_of(shape["BLOCK_K"], values, qkv),
        enable_fp_fusion=True,
    )
    return out


def _values_at_once(heads: int, value_dim: int, device: torch.device) -> int:
    """Return how many values of a head a program has; heads: of all sequences.

    A multiprocessor holds one program. Twice the values take a chunk half as long again, which pays where it saves
    each multiprocessor a turn.
    """
    turns = [cdiv(heads * cdiv(value_dim, values), num_multiprocessors(device)) for values in (32, 64)]
    return 64 if turns[1] < turns[0] else 32


def warps_of(qkv: Tensor) -> int:
    """Return the warps of a program; products of float32 numbers need the registers of many."""
    return 16 if qkv.dtype == torch.float32 else 4


def stages_of(keys: int, values: int, qkv: Tensor) -> int:
    """Return how many chunks are in shared memory at a time, one to compute with, others on their way."""
    chunk = CHUNK * (2 * keys + 2 * CHUNK + values) * qkv.itemsize
    state = (keys + CHUNK) * values * qkv.itemsize
    return max(1, min(3, (shared_memory(qkv.device) - state) // chunk))


@triton.jit
def _look_within_kernel(
    qkv_ptr,
    a_ptr,
    b_ptr,
    log_decay_ptr,
    dt_bias_ptr,
    cu_lens_ptr,
    seqs_ptr,
    first_tokens_ptr,
    solutions_ptr,
    scores_ptr,
    factors_ptr,
    qkv_stride,
    a_stride,
    b_stride,
    LARGEST: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write of a chunk: what makes updates of values less what the state has for them, and the scores of updates.

    The factors of each token are those of its query and its key where they meet the state before the chunk, and of its
    update in the state behind it, or beside the state if the chunk is not whole. Behind them are the logarithms of
    decays up to each token.
    """
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t, d = tl.arange(0, TOKENS), tl.arange(0, BLOCK_K)
    first = tl.load(first_tokens_ptr + chunk).to(tl.int64)
    is_token = t < tl.load(cu_lens_ptr + tl.load(seqs_ptr + chunk) + 1) - first
    q_ptr = qkv_ptr + first * qkv_stride + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM
    places, mask = t[:, None] * qkv_stride + d, is_token[:, None] & (d < KEY_DIM)
    q = tl.load(q_ptr + places, mask=mask, other=0.0)
    k = tl.load(q_ptr + KEY_HEADS * KEY_DIM + places, mask=mask, other=0.0)
    a = tl.load(a_ptr + first * a_stride + head + t * a_stride, mask=is_token, other=0.0)
    b = tl.load(b_ptr + first * b_stride + head + t * b_stride, mask=is_token, other=0.0)
    log_decay, strength = gates_of(a, b, tl.load(log_decay_ptr + head), tl.load(dt_bias_ptr + head), LARGEST)
    total = tl.cumsum(tl.where(is_token, log_decay, 0.0), axis=0)
    last = tl.sum(tl.where(t == TOKENS - 1, total, 0.0), axis=0)  # a sum in another order would not be the same
    q_factor = length_factor(q.to(tl.float32), 1) * KEY_DIM**-0.5
    k_factor = length_factor(k.to(tl.float32), 1)

    rows = factors_ptr + (chunk * VALUE_HEADS + head) * 4 * TOKENS + t
    tl.store(rows, q_factor * tl.exp(total))
    tl.store(rows + TOKENS, k_factor * tl.exp(total))
    is_whole = tl.sum(is_token.to(tl.int32), axis=0) == TOKENS
    tl.store(rows + 2 * TOKENS, k_factor * tl.exp(tl.where(is_whole, last - total, 0.0)))
    tl.store(rows + 3 * TOKENS, total)

    square = (chunk * VALUE_HEADS + head) * (TOKENS * TOKENS) + (t[:, None] * TOKENS + t)
    decay = tl.exp(tl.where(t[:, None] >= t, total[:, None] - total, float("-inf"))) * k_factor
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * decay * q_factor[:, None]
    tl.store(scores_ptr + square, scores.to(q.dtype))
    keys = tl.dot(k, tl.trans(k), input_precision="ieee")
    system = tl.where(t[:, None] > t, keys * decay * (strength * k_factor)[:, None], 0.0)
    solution = invert(system, TOKENS, tl.float32 if q.dtype == tl.float32 else tl.float16) * strength
    tl.store(solutions_ptr + square, solution.to(q.dtype))


@triton.jit(do_not_specialize=["num_chunks"])
def _go_through_kernel(
    qkv_ptr,
    solutions_ptr,
    scores_ptr,
    factors_ptr,
    matrices_ptr,
    keys_ptr,
    updates_ptr,
    decays_ptr,
    cu_lens_ptr,
    starts_ptr,
    standing_ptr,
    final_ptr,
    seqs_ptr,
    snapshots_ptr,
    out_ptr,
    num_chunks,
    qkv_stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RING: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    part, head, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(cu_lens_ptr + seq).to(tl.int64), tl.load(cu_lens_ptr + seq + 1).to(tl.int64)
    t, d, v = tl.arange(0, TOKENS), tl.arange(0, BLOCK_K), part * BLOCK_V + tl.arange(0, BLOCK_V)
    has_k, has_v = d < KEY_DIM, v < VALUE_DIM
    matrix = (head * KEY_DIM + d[:, None]) * VALUE_DIM + v
    matrix_mask = has_k[:, None] & has_v
    MATRICES: tl.constexpr = VALUE_HEADS * VALUE_DIM * KEY_DIM
    standing, final = tl.load(standing_ptr + seq).to(tl.int64), tl.load(final_ptr + seq).to(tl.int64)
    known = (d < tl.where(standing >= 0, KEY_DIM, 0))[:, None] & has_v
    state = tl.load(matrices_ptr + standing * MATRICES + matrix, mask=known, other=0.0).to(tl.float32)
    TOGETHER: tl.constexpr = VALUE_HEADS // KEY_HEADS
    q_places = t[:, None] * qkv_stride + head // TOGETHER * KEY_DIM + d
    v_places = t[:, None] * qkv_stride + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + v
    out_places = (t[:, None] * VALUE_HEADS + head) * VALUE_DIM + v
    places, masks = (q_places, q_places + KEY_HEADS * KEY_DIM, v_places, out_places), (has_k, has_v)
    first_chunk = chunks_before(seqs_ptr, num_chunks, seq)
    whole = ((end - begin) // TOKENS).to(tl.int32)

    for i in range(whole):
        first = begin + i * TOKENS
        chunk = first_chunk + i
        chunk_head = (chunk * VALUE_HEADS + head).to(tl.int64)
        within = terms_of(solutions_ptr, scores_ptr, factors_ptr, chunk_head, t, TOKENS)
        snapshot = tl.load(snapshots_ptr + chunk).to(tl.int64)
        last = tl.load(factors_ptr + chunk_head * 4 * TOKENS + 4 * TOKENS - 1)
        ptrs, is_token = (
            (qkv_ptr + first * qkv_stride, out_ptr + first * VALUE_HEADS * VALUE_DIM),
            (t < TOKENS)[:, None],
        )
        k, updates = _answer(state, ptrs, places, within, is_token, masks)
        state = tl.dot(tl.trans(k), updates, state * decay_of(last), input_precision="ieee")
        if snapshot >= 0:
            snapshot_ptrs = matrices_ptr + snapshot * MATRICES + matrix
            tl.store(snapshot_ptrs, state.to(matrices_ptr.dtype.element_ty), mask=matrix_mask)
    if final >= 0:
        final_ptrs = matrices_ptr + final * MATRICES + matrix
        tl.store(final_ptrs, state.to(matrices_ptr.dtype.element_ty), mask=matrix_mask)

    first = begin + whole * TOKENS
    if first < end:
        chunk_head = ((first_chunk + whole) * VALUE_HEADS + head).to(tl.int64)
        within = terms_of(solutions_ptr, scores_ptr, factors_ptr, chunk_head, t, TOKENS)
        ptrs, is_token = (qkv_ptr + first * qkv_stride, out_ptr + first * VALUE_HEADS * VALUE_DIM), t < end - first
        k, updates = _answer(state, ptrs, places, within, is_token[:, None], masks)
        if final >= 0:
            position = tl.load(starts_ptr + seq) + whole * TOKENS + t
            memory, heads = (matrices_ptr, keys_ptr, updates_ptr, decays_ptr), (head // TOGETHER, head)
            counts = KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM
            tail = k, updates, tl.load(factors_ptr + chunk_head * 4 * TOKENS + 3 * TOKENS + t)
            is_first = (head % TOGETHER == 0) & (part == 0)
            store_tail(memory, final, position, is_token, tail, heads, (is_first, d, v), counts, RING)


@triton.jit
def terms_of(solutions_ptr, scores_ptr, factors_ptr, chunk_head, t, TOKENS: tl.constexpr):
    """Return what a chunk has of itself for a head: pointers to solutions and scores, and the factors of each token."""
    square = chunk_head * (TOKENS * TOKENS) + (t[:, None] * TOKENS + t)
    rows = factors_ptr + chunk_head * 4 * TOKENS + t
    factors = tl.load(rows), tl.load(rows + TOKENS), tl.load(rows + 2 * TOKENS)
    return solutions_ptr + square, scores_ptr + square, factors


@triton.jit
def _answer(state, ptrs, places, within, is_token, masks):
    """Write what a chunk's tokens are answered; returns their keys and updates. All as for `answer`.

    ptrs, places: of results, too, behind the others
    """
    tokens_ptr, out_ptr = ptrs
    q_places, k_places, v_places, out_places = places
    k, updates, out = answer(state, tokens_ptr, (q_places, k_places, v_places), within, is_token, masks)
    tl.store(out_ptr + out_places, out.to(out_ptr.dtype.element_ty), mask=is_token & masks[1])
    return k, (updates * within[2][2][:, None]).to(k.dtype)


@triton.jit
def answer(state, tokens_ptr, places, within, is_token, masks):
    """Return a chunk's keys, their updates in float32, without their factors, and what its tokens are answered.

    tokens_ptr: to the first token's numbers; places: of queries, keys and values behind it
    within: what terms_of returns; is_token: [tokens, 1]; masks: which keys and which values a head has
    """
    q_places, k_places, v_places = places
    solution_ptrs, scores_ptrs, factors = within
    q_factor, k_factor, _ = factors
    has_k, has_v = masks
    k = tl.load(tokens_ptr + k_places, mask=is_token & has_k, other=0.0)
    value = tl.load(tokens_ptr + v_places, mask=is_token & has_v, other=0.0)
    narrow = state.to(k.dtype)
    misses = value - k_factor[:, None] * tl.dot(k, narrow, input_precision="ieee")
    solution = tl.load(solution_ptrs)
    updates = tl.dot(solution, misses.to(k.dtype), input_precision="ieee")
    q = tl.load(tokens_ptr + q_places, mask=is_token & has_k, other=0.0)
    out = q_factor[:, None] * tl.dot(q, narrow, input_precision="ieee")
    scores = tl.load(scores_ptrs)
    out = tl.dot(scores, updates.to(k.dtype), out, input_precision="ieee")
    return k, updates, out
