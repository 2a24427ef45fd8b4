"""Mamba2 for the tokens of a prefill step, in chunks (Dao and Gu, 2024)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nanoinfer.kernels.delta.chunks import CHUNK, STRETCH, Chunks
from nanoinfer.kernels.launch import cdiv, next_power_of_2, shared_memory
from nanoinfer.kernels.mamba.chunks import look_within_kernel, sum_stretch_kernel, walk_stretch_kernel
from nanoinfer.kernels.mamba.terms import grouped, split_channels, steps_of
from nanoinfer.kernels.states.fold import fold_tails
from nanoinfer.kernels.states.memory import Recurrence
from nanoinfer.kernels.states.tails import write_tail

HEADS_AT_ONCE = 16  # whose steps a program of the first launch has together
FEW_NUMBERS = 128  # of a state for each input, up to which four warps hold those of INPUTS
INPUTS = 64  # of a head that a program has


def mamba_chunks(
    xbc: Tensor,
    dt: Tensor,
    log_decay: Tensor,
    dt_bias: Tensor,
    skips: Tensor,
    recurrence: Recurrence,
    chunks: Chunks,
    limits: tuple[float, float],
) -> Tensor:
    """Compute mamba_rows' recurrence for each token of a prefill step; write the states behind sequences and snapshots.

    Matrices get those behind the last whole chunk, and the tokens behind that stand beside them.

    xbc: [tokens, channels], convolved already; dt: [tokens, heads]; the others: as for mamba_rows
    Returns [tokens, heads, dim] in xbc's dtype.
    """
    if chunks.may_fold:
        fold_tails(recurrence, chunks)
    function = mamba_chunks_triton if xbc.is_cuda else mamba_chunks_reference
    return function(xbc, dt, log_decay, dt_bias, skips, recurrence, chunks, limits)


def mamba_chunks_reference(
    xbc: Tensor,
    dt: Tensor,
    log_decay: Tensor,
    dt_bias: Tensor,
    skips: Tensor,
    recurrence: Recurrence,
    chunks: Chunks,
    limits: tuple[float, float],
) -> Tensor:
    """mamba_chunks in torch, behind fold_tails."""
    ends, seqs, final = chunks.cu_lens.tolist(), chunks.seqs.tolist(), chunks.final.tolist()
    matrices, groups, (heads, dim) = recurrence.matrices, recurrence.key_heads, recurrence.updates.shape[2:]
    out = torch.empty((len(xbc), heads, dim), dtype=xbc.dtype, device=xbc.device)
    state = torch.zeros_like(matrices[0], dtype=torch.float32)
    for chunk, (seq, first) in enumerate(zip(seqs, chunks.first_tokens.tolist(), strict=True)):
        if first == ends[seq]:
            slot = int(chunks.standing[seq])
            state = matrices[slot].float() if slot >= 0 else torch.zeros_like(state)
        tokens = slice(first, min(first + CHUNK, ends[seq + 1]))
        x, b, c = (y.transpose(0, 1) for y in split_channels(xbc[tokens], heads, dim, groups))
        steps, decays = (y.T.unsqueeze(-1) for y in steps_of(dt[tokens], log_decay, dt_bias, limits))
        total, updates = decays.double().cumsum(dim=1), steps * x  # in float32, large sums have lost what follows
        last = total[:, -1:]
        later = torch.ones(total.shape[1], total.shape[1], dtype=torch.bool, device=xbc.device).triu(1)
        scores = c @ b.mT * (total - total.mT).masked_fill(later, -torch.inf).exp().float()
        answers = scores @ updates + total.exp().float() * c @ state + skips.float()[:, None, None] * x
        out[tokens] = answers.transpose(0, 1).to(out.dtype)
        if tokens.stop - first < CHUNK:
            terms = grouped(xbc[tokens], heads * dim, groups), updates.transpose(0, 1), total[..., 0].T.float()
            write_tail(recurrence, final[seq], chunks.end(seq), terms)
        else:
            state = state * last.exp().float() + b.mT @ ((last - total).exp().float() * updates)
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
    recurrence: Recurrence,
    chunks: Chunks,
    limits: tuple[float, float],
) -> Tensor:
    """mamba_chunks behind fold_tails, as two launches, or three where a sequence has several stretches.

    The first one's programs have a chunk and a group each: what does not depend on the state. Those of the last have a
    stretch, and some inputs of a head, and go from chunk to chunk. The state before a stretch is made of what the
    launch between them sums up of the stretches before it.
    """
    (heads, numbers, dim), groups = recurrence.matrices.shape[1:], recurrence.key_heads
    out = torch.empty((len(xbc), heads, dim), dtype=xbc.dtype, device=xbc.device)
    shape = shape_of(groups, heads, numbers, dim)
    tile = tile_of(shape["BLOCK_N"], dim, xbc)
    where = chunks.cu_lens, chunks.seqs, chunks.first_tokens
    squares, factors = look_within((xbc, dt), (log_decay, dt_bias), where, shape, limits)
    grid = cdiv(dim, tile.inputs), heads, len(chunks.stretches)
    shape |= {"CHUNKS": STRETCH, "BLOCK_D": tile.inputs, "num_warps": tile.warps, "num_stages": tile.stages}
    sums, summed = factors, most_summed(chunks)
    if summed:
        sums = torch.empty((summed, heads, numbers, dim), dtype=torch.float32, device=xbc.device)
        what = xbc, factors, recurrence.matrices, sums, *where, chunks.stretches, chunks.standing, xbc.stride(0)
        sum_stretch_kernel[*grid[:2], summed](*what, **shape, enable_fp_fusion=True)
    walk_stretch_kernel[grid](
        xbc,
        squares,
        factors,
        skips,
        sums,
        *recurrence,
        *where,
        chunks.starts,
        chunks.stretches,
        chunks.standing,
        chunks.final,
        chunks.snapshots,
        out,
        summed,
        xbc.stride(0),
        RING=recurrence.ring,
        DIVIDED=summed > 0,
        **shape,
        enable_fp_fusion=True,
    )
    return out


def shape_of(groups: int, heads: int, numbers: int, dim: int) -> dict[str, int]:
    """Return the sizes that all kernels of chunks compile for."""
    return {
        "GROUPS": groups,
        "HEADS": heads,
        "DIM": dim,
        "NUMBERS": numbers,
        "TOKENS": CHUNK,
        "BLOCK_N": max(16, next_power_of_2(numbers)),
    }


def look_within(
    terms: tuple[Tensor, Tensor],
    gates: tuple[Tensor, Tensor],
    cuts: tuple[Tensor, Tensor, Tensor],
    shape: dict[str, int],
    limits: tuple[float, float],
) -> tuple[Tensor, Tensor]:
    """Launch the first kernel of mamba_chunks_triton; returns its squares and factors.

    terms: xbc and dt; gates: log_decay and dt_bias; cuts: cu_lens, seqs and first_tokens, as Chunks has them
    """
    (xbc, dt), chunks, groups = terms, len(cuts[1]), shape["GROUPS"]
    squares = torch.empty((chunks, groups, CHUNK, CHUNK), dtype=xbc.dtype, device=xbc.device)
    factors = torch.empty((chunks, shape["HEADS"], 2, CHUNK), dtype=torch.float32, device=xbc.device)
    look_within_kernel[(chunks, groups)](
        *terms,
        *gates,
        *cuts,
        squares,
        factors,
        xbc.stride(0),
        dt.stride(0),
        *limits,
        **shape,
        BLOCK_H=HEADS_AT_ONCE,
        num_warps=16 if xbc.itemsize == 4 else 4,
        enable_fp_fusion=True,
    )
    return squares, factors


def most_summed(chunks: Chunks) -> int:
    """Return of how many stretches, the first ones, what they add is summed up: those of sequences that have several.

    It may be of a few others, too. Short sequences, which may be many, would have sums as large as their states.
    """
    further = len(chunks.stretches) - len(chunks.starts)
    return min(len(chunks.stretches), 2 * further)  # no more sequences than that have further ones


class _Tile(NamedTuple):
    """How programs divide a head.

    inputs: of a program; warps: its; stages: chunks in shared memory, one to compute with, others on their way
    """

    inputs: int
    warps: int
    stages: int


def tile_of(numbers: int, dim: int, xbc: Tensor) -> _Tile:
    """Return the tile of a state with so many numbers for each of `dim` inputs; products in float32 need many warps."""
    inputs = max(16, min(INPUTS, next_power_of_2(dim)))
    if xbc.itemsize == 4:
        return _Tile(16, 8, 1)
    if numbers > FEW_NUMBERS:
        inputs = INPUTS  # for an H100, Triton 3.6 compiles fewer wrongly: they leave the shared memory
    chunk = CHUNK * (2 * numbers + CHUNK + inputs) * xbc.itemsize
    state = (numbers + CHUNK) * inputs * xbc.itemsize
    stages = max(1, min(2, (shared_memory(xbc.device) - state) // chunk))
    return _Tile(inputs, 4 if numbers <= FEW_NUMBERS else 8, stages)
