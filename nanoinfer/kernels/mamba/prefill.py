"""Mamba2 for the tokens of a prefill step, in chunks (Dao and Gu, 2024)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.delta.chunks import CHUNK, Chunks, chunks_before
from nanoinfer.kernels.delta.terms import decay_of
from nanoinfer.kernels.launch import cdiv, next_power_of_2
from nanoinfer.kernels.mamba.terms import split_channels, step_of, steps_of

INPUTS_AT_ONCE = 64  # of a head that a program has


def mamba_chunks(
    xbc: Tensor,
    dt: Tensor,
    log_decay: Tensor,
    dt_bias: Tensor,
    skips: Tensor,
    matrices: Tensor,
    chunks: Chunks,
    groups: int,
    limits: tuple[float, float],
) -> Tensor:
    """Compute mamba_rows' recurrence for each token of a prefill step; write the states behind sequences and snapshots.

    xbc: [tokens, channels], convolved already; dt: [tokens, heads]; the others: as for mamba_rows
    Returns [tokens, heads, dim] in xbc's dtype.
    """
    function = mamba_chunks_triton if xbc.is_cuda else mamba_chunks_reference
    return function(xbc, dt, log_decay, dt_bias, skips, matrices, chunks, groups, limits)


def mamba_chunks_reference(
    xbc: Tensor,
    dt: Tensor,
    log_decay: Tensor,
    dt_bias: Tensor,
    skips: Tensor,
    matrices: Tensor,
    chunks: Chunks,
    groups: int,
    limits: tuple[float, float],
) -> Tensor:
    """mamba_chunks in torch."""
    ends, seqs, final = chunks.cu_lens.tolist(), chunks.seqs.tolist(), chunks.final.tolist()
    heads, dim, _ = matrices.shape[1:]
    out = torch.empty((len(xbc), heads, dim), dtype=xbc.dtype, device=xbc.device)
    state = torch.zeros_like(matrices[0], dtype=torch.float32)
    for chunk, (seq, first) in enumerate(zip(seqs, chunks.first_tokens.tolist(), strict=True)):
        if first == ends[seq]:
            slot = int(chunks.initial[seq])
            state = matrices[slot].float() if slot >= 0 else torch.zeros_like(state)
        tokens = slice(first, min(first + CHUNK, ends[seq + 1]))
        x, b, c = (y.transpose(0, 1) for y in split_channels(xbc[tokens], heads, dim, groups))
        steps, decays = (y.T.unsqueeze(-1) for y in steps_of(dt[tokens], log_decay, dt_bias, limits))
        total = decays.cumsum(dim=1)
        last = total[:, -1:]
        later = torch.ones(total.shape[1], total.shape[1], dtype=torch.bool, device=xbc.device).triu(1)
        scores = c @ b.mT * (total - total.mT).masked_fill(later, -torch.inf).exp()
        answers = scores @ (steps * x) + total.exp() * c @ state.mT + skips.float()[:, None, None] * x
        out[tokens] = answers.transpose(0, 1).to(out.dtype)
        state = state * last.exp() + (steps * (last - total).exp() * x).mT @ b
        is_last = tokens.stop == ends[seq + 1]
        for slot in (int(chunks.snapshots[chunk]), final[seq] if is_last else -1):
            if slot >= 0:
                matrices[slot] = state.to(matrices.dtype)
    return out


def mamba_chunks_triton(
    xbc: Tensor,
    dt: Tensor,
    log_decay: Tensor,
    dt_bias: Tensor,
    skips: Tensor,
    matrices: Tensor,
    chunks: Chunks,
    groups: int,
    limits: tuple[float, float],
) -> Tensor:
    """mamba_chunks as one launch: a program has a sequence, and some inputs of a head, and goes from chunk to chunk."""
    heads, dim, numbers = matrices.shape[1:]
    out = torch.empty((len(xbc), heads, dim), dtype=xbc.dtype, device=xbc.device)
    block_n = max(16, next_power_of_2(numbers))
    block_d = max(16, min(INPUTS_AT_ONCE if block_n <= 128 and xbc.itemsize == 2 else 32, next_power_of_2(dim)))
    _mamba_chunks_kernel[(cdiv(dim, block_d), heads, len(chunks.starts))](
        xbc,
        dt,
        log_decay,
        dt_bias,
        skips,
        matrices,
        chunks.cu_lens,
        chunks.initial,
        chunks.final,
        chunks.seqs,
        chunks.snapshots,
        out,
        len(chunks.seqs),
        xbc.stride(0),
        dt.stride(0),
        *limits,
        GROUPS=groups,
        HEADS=heads,
        DIM=dim,
        NUMBERS=numbers,
        TOKENS=CHUNK,
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        num_warps=16 if xbc.itemsize == 4 else 8,
        num_stages=1 if xbc.itemsize == 4 else 2,
        enable_fp_fusion=True,
    )
    return out


@triton.jit(do_not_specialize=["num_chunks", "least", "most"])
def _mamba_chunks_kernel(
    xbc_ptr,
    dt_ptr,
    log_decay_ptr,
    dt_bias_ptr,
    skips_ptr,
    matrices_ptr,
    cu_lens_ptr,
    initial_ptr,
    final_ptr,
    seqs_ptr,
    snapshots_ptr,
    out_ptr,
    num_chunks,
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
    BLOCK_D: tl.constexpr,
):
    part, head, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(cu_lens_ptr + seq).to(tl.int64), tl.load(cu_lens_ptr + seq + 1).to(tl.int64)
    t, n, d = tl.arange(0, TOKENS), tl.arange(0, BLOCK_N), part * BLOCK_D + tl.arange(0, BLOCK_D)
    has_n, has_d = n < NUMBERS, d < DIM
    matrix = (head * DIM + d[None, :]) * NUMBERS + n[:, None]  # the state is transposed here: [numbers, inputs]
    matrix_mask = has_n[:, None] & has_d
    MATRICES: tl.constexpr = HEADS * DIM * NUMBERS
    initial = tl.load(initial_ptr + seq).to(tl.int64)
    known = (n < tl.where(initial >= 0, NUMBERS, 0))[:, None] & has_d
    state = tl.load(matrices_ptr + initial * MATRICES + matrix, mask=known, other=0.0).to(tl.float32)
    log_decay, dt_bias, skip = tl.load(log_decay_ptr + head), tl.load(dt_bias_ptr + head), tl.load(skips_ptr + head)
    x_places = t[:, None] * xbc_stride + head * DIM + d
    b_places = t[:, None] * xbc_stride + HEADS * DIM + head // (HEADS // GROUPS) * NUMBERS + n
    first_chunk = chunks_before(seqs_ptr, num_chunks, seq)

    for i in range(tl.cdiv(end - begin, TOKENS)):
        first = begin + i * TOKENS
        is_token = t < end - first
        tokens_ptr, mask = xbc_ptr + first * xbc_stride, is_token[:, None] & has_n
        dt = tl.load(dt_ptr + (first + t) * dt_stride + head, mask=is_token, other=0.0)
        x = tl.load(tokens_ptr + x_places, mask=is_token[:, None] & has_d, other=0.0)
        b = tl.load(tokens_ptr + b_places, mask=mask, other=0.0)
        c = tl.load(tokens_ptr + GROUPS * NUMBERS + b_places, mask=mask, other=0.0)
        snapshot = tl.load(snapshots_ptr + first_chunk + i).to(tl.int64)
        step, decay = step_of(dt, log_decay, dt_bias, least, most)
        total = tl.cumsum(tl.where(is_token, decay, 0.0), axis=0)
        last = tl.sum(tl.where(t == TOKENS - 1, total, 0.0), axis=0)  # a sum in another order would not be the same
        between = tl.exp(tl.where(t[:, None] >= t, total[:, None] - total, float("-inf")))
        scores = tl.dot(c, tl.trans(b), input_precision="ieee") * between * step
        out = tl.dot(c, state.to(c.dtype), input_precision="ieee") * tl.exp(total)[:, None]
        out = tl.dot(scores.to(x.dtype), x, out, input_precision="ieee") + skip * x.to(tl.float32)
        taken = (x.to(tl.float32) * (step * tl.exp(last - total))[:, None]).to(x.dtype)
        state = tl.dot(tl.trans(b), taken, state * decay_of(last), input_precision="ieee")

        out_ptrs = out_ptr + ((first + t[:, None]) * HEADS + head) * DIM + d
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_token[:, None] & has_d)
        if snapshot >= 0:
            snapshot_ptrs = matrices_ptr + snapshot * MATRICES + matrix
            tl.store(snapshot_ptrs, state.to(matrices_ptr.dtype.element_ty), mask=matrix_mask)
    final = tl.load(final_ptr + seq).to(tl.int64)
    if final >= 0:
        final_ptrs = matrices_ptr + final * MATRICES + matrix
        tl.store(final_ptrs, state.to(matrices_ptr.dtype.element_ty), mask=matrix_mask)
