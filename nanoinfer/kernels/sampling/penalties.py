"""Penalties for tokens that occurred before."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import cdiv, launch_options, wait_for_predecessor

TOKENS_AT_ONCE = 4096  # of each row: more would take more memory
BLOCK = 2048  # tokens in a slice of the vocabulary
BLOCK_TOKENS = 1024  # of a row, which a program counts at once


def penalize(
    logits: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    prompt_lengths: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Make tokens that have occurred less likely, or more likely; returns the new logits, [rows, vocabulary].

    logits: [rows, vocabulary] float32
    tokens: [rows, longest] int32 or int64, each row's prompt and output, of which the first `lengths` are valid
    lengths, prompt_lengths: [rows] int32
    repetition: [rows], for tokens of prompt and output: divides a positive logit and multiplies a negative one (Keskar
        et al., 2019)
    presence: [rows], for tokens of the output: subtracted from the logit once
    frequency: [rows], for tokens of the output: subtracted from the logit once for each time that the token occurs
    """
    function = penalize_triton if logits.is_cuda else penalize_reference
    return function(logits, tokens, lengths, prompt_lengths, repetition, presence, frequency)


def penalize_reference(
    logits: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    prompt_lengths: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """penalize in torch."""
    seen, counts = torch.zeros_like(logits), torch.zeros_like(logits)
    for start in range(0, tokens.shape[1], TOKENS_AT_ONCE):
        some = tokens[:, start : start + TOKENS_AT_ONCE]
        at = torch.arange(start, start + some.shape[1], device=tokens.device)
        is_valid = at < lengths[:, None]
        some = some.where(is_valid, 0).long()
        seen.scatter_add_(1, some, is_valid.float())
        counts.scatter_add_(1, some, (is_valid & (at >= prompt_lengths[:, None])).float())

    factor = torch.where(logits > 0, 1 / repetition[:, None], repetition[:, None])
    logits = torch.where(seen > 0, logits * factor, logits)
    return logits - frequency[:, None] * counts - presence[:, None] * (counts > 0)


def penalize_triton(
    logits: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    prompt_lengths: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """penalize as one launch, whose programs count a row's tokens, each those of its slice of the vocabulary."""
    rows, vocabulary = logits.shape
    out = torch.empty((rows, vocabulary), dtype=logits.dtype, device=logits.device)
    _penalize_kernel[(rows, cdiv(vocabulary, BLOCK))](
        logits,
        tokens,
        lengths,
        prompt_lengths,
        repetition,
        presence,
        frequency,
        out,
        vocabulary,
        tokens.shape[1],
        logits.stride(0),
        tokens.stride(0),
        BLOCK=BLOCK,
        BLOCK_TOKENS=BLOCK_TOKENS,
        **launch_options(logits, fused=False),
    )
    return out


@triton.jit(do_not_specialize=["longest", "token_stride"])
def _penalize_kernel(
    logits_ptr,
    tokens_ptr,
    lengths_ptr,
    prompt_lengths_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    out_ptr,
    vocabulary,
    longest,
    row_stride,
    token_stride,
    BLOCK: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY)
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    column = first + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * row_stride + column, mask=column < vocabulary, other=0.0)
    repetition, presence = tl.load(repetition_ptr + row), tl.load(presence_ptr + row)
    frequency, prompt_length = tl.load(frequency_ptr + row), tl.load(prompt_lengths_ptr + row)
    in_prompt, in_output = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, tl.minimum(tl.load(lengths_ptr + row), longest), BLOCK_TOKENS):
        at = start + tl.arange(0, BLOCK_TOKENS)
        is_valid = at < tl.load(lengths_ptr + row)
        own = tl.load(tokens_ptr + row * token_stride + at, mask=is_valid & (at < longest), other=-1).to(tl.int32)
        own -= first
        is_here = (own >= 0) & (own < BLOCK)
        if tl.max(is_here.to(tl.int32), axis=0) > 0:
            bins = tl.where(is_here, own, 0)
            in_prompt += tl.histogram(bins, BLOCK, mask=is_here & (at < prompt_length))
            in_output += tl.histogram(bins, BLOCK, mask=is_here & (at >= prompt_length))
    factor = tl.where(x > 0, tl.div_rn(1.0, repetition), repetition)
    x = tl.where(in_prompt + in_output > 0, x * factor, x)
    x = x - frequency * in_output.to(tl.float32) - presence * (in_output > 0).to(tl.float32)
    tl.store(out_ptr + row * vocabulary + column, x, mask=column < vocabulary)
