"""Log-probabilities of one token a row, in one pass over the logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import cdiv, launch_options, next_power_of_2, wait_for_predecessor

BLOCK = 4096  # tokens in a slice of the vocabulary


class TokenLogProbs(NamedTuple):
    """What token_logprobs returns; all are [rows].

    values: float32, the log-probability of the row's token
    ranks: int32, one more than the number of tokens with a larger logit
    normalizers: float32, log(sum(exp(logits))): a token's logit less this is its log-probability
    """

    values: Tensor
    ranks: Tensor
    normalizers: Tensor


def token_logprobs(logits: Tensor, token_ids: Tensor) -> TokenLogProbs:
    """Compute the log-probability of each row's token, log_softmax(logits)[token], in float32.

    logits: [rows, vocabulary] of any floating dtype; token_ids: [rows]
    """
    return (token_logprobs_triton if logits.is_cuda else token_logprobs_reference)(logits, token_ids)


def token_logprobs_reference(logits: Tensor, token_ids: Tensor) -> TokenLogProbs:
    """token_logprobs in torch."""
    wide = logits.float()
    own = wide.gather(1, token_ids[:, None].long())
    normalizers = wide.logsumexp(dim=1)
    ranks = (wide > own).sum(dim=1, dtype=torch.int32) + 1
    return TokenLogProbs(own.squeeze(1) - normalizers, ranks, normalizers)


def token_logprobs_triton(logits: Tensor, token_ids: Tensor) -> TokenLogProbs:
    """token_logprobs as two launches: one reads each slice of the vocabulary, the next puts a row's slices together."""
    rows, vocabulary = logits.shape
    assert logits.stride(1) == 1
    slices = cdiv(vocabulary, BLOCK)
    largest, sums = torch.empty((2, rows, slices), dtype=torch.float32, device=logits.device)
    counts = torch.empty((rows, slices), dtype=torch.int32, device=logits.device)
    _slice_kernel[(rows, slices)](
        logits, token_ids, largest, sums, counts, vocabulary, logits.stride(0), BLOCK=BLOCK, **launch_options(logits)
    )
    values, normalizers = torch.empty((2, rows), dtype=torch.float32, device=logits.device)
    ranks = torch.empty(rows, dtype=torch.int32, device=logits.device)
    _row_kernel[(rows,)](
        logits,
        token_ids,
        largest,
        sums,
        counts,
        values,
        ranks,
        normalizers,
        slices,
        logits.stride(0),
        BLOCK=next_power_of_2(slices),
        **launch_options(logits),
    )
    return TokenLogProbs(values, ranks, normalizers)


@triton.jit
def _slice_kernel(
    logits_ptr,
    token_ids_ptr,
    largest_ptr,
    sums_ptr,
    counts_ptr,
    vocabulary,
    row_stride,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY)
    row, slice_id, slices = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    column = slice_id * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(row_ptr + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
    own = tl.load(row_ptr + tl.load(token_ids_ptr + row)).to(tl.float32)
    largest = tl.max(logits, axis=0)
    shift = tl.where(largest == float("-inf"), 0.0, largest)  # -inf less -inf is no number
    place = row * slices + slice_id
    tl.store(largest_ptr + place, largest)
    tl.store(sums_ptr + place, tl.sum(tl.exp(logits - shift), axis=0))
    tl.store(counts_ptr + place, tl.sum((logits > own).to(tl.int32), axis=0))


@triton.jit
def _row_kernel(
    logits_ptr,
    token_ids_ptr,
    largest_ptr,
    sums_ptr,
    counts_ptr,
    values_ptr,
    ranks_ptr,
    normalizers_ptr,
    slices,
    row_stride,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY)
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    mask, place = i < slices, row * slices + i
    shifts = tl.load(largest_ptr + place, mask=mask, other=float("-inf"))
    largest = tl.max(shifts, axis=0)
    parts = tl.load(sums_ptr + place, mask=mask, other=0.0) * tl.exp(shifts - largest)  # 0 if all of a slice is -inf
    normalizer = largest + tl.log(tl.sum(parts, axis=0))
    own = tl.load(logits_ptr + row.to(tl.int64) * row_stride + tl.load(token_ids_ptr + row)).to(tl.float32)
    tl.store(values_ptr + row, own - normalizer)
    tl.store(ranks_ptr + row, tl.sum(tl.load(counts_ptr + place, mask=mask, other=0), axis=0) + 1)
    tl.store(normalizers_ptr + row, normalizer)
