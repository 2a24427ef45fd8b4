"""What the hidden states of texts add up to, in any order of their tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import cdiv, launch_options, wait_for_predecessor

UNIT = tl.constexpr(2.0**24)  # sums count 1 / UNIT
ROUNDS = tl.constexpr(1.5 * 2**52)  # float64 that has got it added holds a whole number
ADDED_AT_ONCE = 1024  # tokens in torch, so that their sums need little memory
BLOCK_TOKENS, BLOCK_SIZE = 16, 64


def sum_texts(hidden: Tensor, begins: Tensor, lens: Tensor, starts: Tensor | None = None) -> Tensor:
    """Add up the hidden states of each text; returns [texts, size] float64.

    hidden: [tokens, size]
    begins, lens: [texts] int32, where each text's hidden states begin, and how many they are
    starts: [texts] int32, the place in its text of each first token, to count each token times its place, from 1; None:
        each counts once
    Each number is rounded to a multiple of 1 / UNIT. So float64 adds them without an error, up to sums of 2^29, and no
    order of tokens or chunks can change the sum.
    """
    return (sum_texts_triton if hidden.is_cuda else sum_texts_reference)(hidden, begins, lens, starts)


def sum_texts_reference(hidden: Tensor, begins: Tensor, lens: Tensor, starts: Tensor | None = None) -> Tensor:
    """sum_texts in torch."""
    count, device = len(begins), hidden.device
    owners = torch.arange(count, device=device).repeat_interleave(lens)
    within = torch.arange(len(owners), device=device) - (lens.cumsum(0) - lens)[owners]
    sums = torch.zeros(count, hidden.shape[1], dtype=torch.float64, device=device)
    for own, places in zip(owners.split(ADDED_AT_ONCE), within.split(ADDED_AT_ONCE), strict=True):
        numbers = hidden[begins[own] + places].double().mul_(UNIT.value).round_()
        if starts is not None:
            numbers.mul_((starts[own] + places + 1).unsqueeze(1))
        sums.index_add_(0, own, numbers)
    return sums.div_(UNIT.value)


def sum_texts_triton(hidden: Tensor, begins: Tensor, lens: Tensor, starts: Tensor | None = None) -> Tensor:
    """sum_texts as one launch."""
    sums = torch.empty(len(begins), hidden.shape[1], dtype=torch.float64, device=hidden.device)
    _sum_kernel[(len(begins), cdiv(hidden.shape[1], BLOCK_SIZE))](
        hidden,
        begins,
        lens,
        starts,
        sums,
        hidden.shape[1],
        BLOCK_TOKENS=BLOCK_TOKENS,
        BLOCK_SIZE=BLOCK_SIZE,
        **launch_options(hidden),
    )
    return sums


@triton.jit
def _sum_kernel(
    hidden_ptr,
    begins_ptr,
    lens_ptr,
    starts_ptr,
    sums_ptr,
    size,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY)
    text = tl.program_id(0)
    begin, length = tl.load(begins_ptr + text).to(tl.int64), tl.load(lens_ptr + text)
    column = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    total = tl.zeros([BLOCK_SIZE], tl.float64)
    for first in range(0, length, BLOCK_TOKENS):
        token = first + tl.arange(0, BLOCK_TOKENS)
        mask = (token < length)[:, None] & (column < size)[None, :]
        x = tl.load(hidden_ptr + (begin + token)[:, None] * size + column[None, :], mask=mask, other=0.0)
        numbers = (x.to(tl.float64) * UNIT + ROUNDS) - ROUNDS
        if starts_ptr is not None:
            numbers *= (tl.load(starts_ptr + text) + 1 + token).to(tl.float64)[:, None]
        total += tl.sum(numbers, axis=0)
    tl.store(sums_ptr + text.to(tl.int64) * size + column, total / UNIT, mask=column < size)
