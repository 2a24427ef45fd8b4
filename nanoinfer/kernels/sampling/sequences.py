"""Sequences of tokens that may not be generated."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import cdiv, launch_options, next_power_of_2, wait_for_predecessor

BLOCK = 32  # sequences that a program compares


def ban_sequences(logits: Tensor, tokens: Tensor, positions: Tensor, starts: Tensor, sequences: Tensor) -> Tensor:
    """Return the logits, [rows, vocabulary], with -inf for each token that would complete a sequence.

    tokens: [rows, longest] int32, each row's prompt and output; of a row without sequences any numbers, and too few
    positions: [rows] int32, of the tokens to be drawn; starts: [rows] int32, where the outputs begin
    sequences: [rows, n, length] int64; a shorter one begins with negative numbers, and one that is no sequence has no
        others
    """
    function = ban_sequences_triton if logits.is_cuda else ban_sequences_reference
    return function(logits, tokens, positions, starts, sequences)


def ban_sequences_reference(
    logits: Tensor, tokens: Tensor, positions: Tensor, starts: Tensor, sequences: Tensor
) -> Tensor:
    """ban_sequences in torch."""
    first, last = sequences[..., :-1], sequences[..., -1]
    at = positions[:, None].long() + torch.arange(-first.shape[2], 0, device=tokens.device)
    before, is_output = tokens.gather(1, at.clamp(0, tokens.shape[1] - 1)), at >= starts[:, None]
    is_there = (first < 0) | ((before[:, None] == first) & is_output[:, None])
    is_banned = is_there.all(dim=2) & (last >= 0)
    change = torch.zeros_like(last, dtype=logits.dtype).masked_fill(is_banned, float("-inf"))
    return logits.scatter_add(1, last.clamp(min=0), change)


def ban_sequences_triton(
    logits: Tensor, tokens: Tensor, positions: Tensor, starts: Tensor, sequences: Tensor
) -> Tensor:
    """ban_sequences as a copy and a launch."""
    rows, count, length = sequences.shape
    out = logits.clone(memory_format=torch.contiguous_format)
    _ban_kernel[(rows, cdiv(count, BLOCK))](
        tokens,
        positions,
        starts,
        sequences.contiguous(),
        out,
        count,
        length,
        tokens.shape[1],
        tokens.stride(0),
        out.stride(0),
        BLOCK=BLOCK,
        BLOCK_LENGTH=next_power_of_2(length),
        **launch_options(logits),
    )
    return out


@triton.jit(do_not_specialize=["count", "length", "longest", "token_stride"])
def _ban_kernel(
    tokens_ptr,
    positions_ptr,
    starts_ptr,
    sequences_ptr,
    out_ptr,
    count,
    length,
    longest,
    token_stride,
    row_stride,
    BLOCK: tl.constexpr,
    BLOCK_LENGTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY)
    row = tl.program_id(0).to(tl.int64)
    sequence, i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_LENGTH)
    exists, is_first = sequence < count, i < length - 1
    places = sequences_ptr + (row * count + sequence) * length
    first = tl.load(places[:, None] + i[None, :], mask=exists[:, None] & is_first[None, :], other=-1)
    last = tl.load(places + length - 1, mask=exists, other=-1)
    at = tl.load(positions_ptr + row) - (length - 1) + i
    is_output = is_first & (at >= tl.load(starts_ptr + row)) & (at >= 0) & (at < longest)
    before = tl.load(tokens_ptr + row * token_stride + at, mask=is_output, other=-1)
    is_there = (first < 0) | (before[None, :] == first)
    is_banned = (last >= 0) & (tl.min(is_there.to(tl.int32), axis=1) > 0)
    tl.store(out_ptr + row * row_stride + last, float("-inf"), mask=is_banned)
