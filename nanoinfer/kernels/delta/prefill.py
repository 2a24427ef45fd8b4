"""The gated delta rule for the tokens of a prefill step, in chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from nanoinfer.kernels.delta.chunks import CHUNK, Chunks
from nanoinfer.kernels.delta.terms import gates, split_heads


def delta_chunks(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    log_decay: Tensor,
    dt_bias: Tensor,
    matrices: Tensor,
    chunks: Chunks,
    key_heads: int,
) -> Tensor:
    """Compute delta_rows' recurrence for each token of a prefill step; write the states behind sequences and snapshots.

    qkv: [tokens, channels], convolved already; a, b: [tokens, value heads]
    log_decay, dt_bias, matrices, key_heads: as for delta_rows
    Returns [tokens, value heads, value dim] in qkv's dtype.
    """
    return delta_chunks_reference(qkv, a, b, log_decay, dt_bias, matrices, chunks, key_heads)


def delta_chunks_reference(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    log_decay: Tensor,
    dt_bias: Tensor,
    matrices: Tensor,
    chunks: Chunks,
    key_heads: int,
) -> Tensor:
    """delta_chunks in torch: the chunked form of Yang et al. (2024).

    Within a chunk, each token's update depends on those before it: a triangular system gives them all, as what they
    would be behind a state of zeros, and what the state before the chunk takes away.
    """
    tokens = chunks.first_tokens.unsqueeze(1) + torch.arange(CHUNK, device=qkv.device)
    is_token = tokens < chunks.cu_lens[chunks.seqs.long() + 1].unsqueeze(1)
    at = tokens.where(is_token, 0)
    mask = is_token[:, None, :, None]  # all below is [chunks, value heads, CHUNK, ...]
    q, k, v = (x[at].transpose(1, 2) * mask for x in split_heads(qkv, key_heads, *matrices.shape[1:3]))
    decays, strengths = (x[at].transpose(1, 2).unsqueeze(-1) * mask for x in gates(a, b, log_decay, dt_bias))
    total = decays.cumsum(dim=2)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=qkv.device).triu(1)
    between = (total - total.mT).masked_fill(later, -torch.inf).exp()
    system = strengths * (k @ k.mT) * between  # the solver reads what is below the diagonal, and takes 1 for it
    updates, taken = torch.linalg.solve_triangular(
        system, torch.cat([strengths * v, strengths * total.exp() * k], dim=-1), upper=False, unitriangular=True
    ).split([v.shape[-1], k.shape[-1]], dim=-1)
    scores = (q @ k.mT) * between
    q = q * total.exp()
    k = k * (total[:, :, -1:] - total).exp()
    decay_of_chunk = total[:, :, -1:].exp()

    out = torch.empty_like(v)
    state, seq_before = torch.empty(0), -1
    initial, final, ends = chunks.initial.tolist(), chunks.final.tolist(), chunks.cu_lens.tolist()[1:]
    firsts, snapshots = chunks.first_tokens.tolist(), chunks.snapshots.tolist()
    for chunk, seq in enumerate(chunks.seqs.tolist()):
        if seq != seq_before:
            slot = initial[seq]
            state = matrices[slot].float() if slot >= 0 else torch.zeros_like(matrices[0], dtype=torch.float32)
        seq_before = seq
        new = updates[chunk] - taken[chunk] @ state.mT
        out[chunk] = q[chunk] @ state.mT + scores[chunk] @ new
        state = state * decay_of_chunk[chunk] + new.mT @ k[chunk]
        if snapshots[chunk] >= 0:
            matrices[snapshots[chunk]] = state.to(matrices.dtype)
        if firsts[chunk] + CHUNK >= ends[seq] and final[seq] >= 0:
            matrices[final[seq]] = state.to(matrices.dtype)
    return out.transpose(1, 2)[is_token].to(qkv.dtype)
