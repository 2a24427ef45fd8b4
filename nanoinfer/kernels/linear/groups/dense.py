"""Products of many tokens with a GroupWeight on a GPU, by way of a copy in the tokens' dtype.

The copy has so many rows of the weight at a time that the L2 cache still has them when cuBLAS reads them. torch's
allocator gives each the memory of the one before.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.groups import BITS, GroupWeight, dequantize_reference
from nanoinfer.kernels.launch import cdiv, launch_options, wait_for_predecessor
from nanoinfer.kernels.linear.groups.scales import load_factors, readable, scale_dots, widen
from nanoinfer.kernels.unpacking import middle_of, unpack_tile

COPY = 32 << 20  # bytes
ALIGNED = 256  # rows; cuBLAS is slow where a tile's begin is not
ROWS, STEPS = 16, (256, 128, 64, 32)  # of a program's tile: rows, and inputs of which a group has all or some of all


def dense_linear(x: Tensor, weight: GroupWeight, bias: Tensor | None = None) -> Tensor:
    """Compute kernels.linear.dispatch.linear on a GPU, in x's dtype."""
    rows = max(COPY // (weight.in_features * x.itemsize) // ALIGNED, 1) * ALIGNED
    if len(weight.words) <= rows:
        return F.linear(x, dequantize(weight, x.dtype), bias)
    out = x.new_empty(len(x), len(weight.words))
    for first, part in zip(range(0, len(weight.words), rows), weight.split(rows), strict=True):
        columns, dense = slice(first, first + rows), dequantize(part, x.dtype).t()
        if bias is None:
            torch.mm(x, dense, out=out[:, columns])
        else:
            torch.addmm(bias[columns], x, dense, out=out[:, columns])
    return out


def dequantize(weight: GroupWeight, dtype: torch.dtype, chosen: Tensor | None = None) -> Tensor:
    """Return the weight in a floating type, [out_features, in_features], each number rounded once.

    chosen: the numbers of the rows to return, of int32; None: all
    """
    step = _step_of(weight)
    if weight.words.is_cuda and step is not None:
        return dequantize_triton(weight, dtype, step, chosen)
    return dequantize_reference(weight if chosen is None else weight.select(chosen), dtype)


def _step_of(weight: GroupWeight) -> int | None:
    """Return how many inputs a tile has; None: groups do not divide it, nor it them."""
    group, is_one = weight.group, weight.scales.shape[1] == 1
    return next((step for step in STEPS if is_one or group % step == 0 or step % group == 0), None)


def dequantize_triton(weight: GroupWeight, dtype: torch.dtype, step: int, chosen: Tensor | None = None) -> Tensor:
    """dequantize as one launch. step: the inputs of a tile"""
    rows, groups = weight.scales.shape if chosen is None else (len(chosen), weight.scales.shape[1])
    out = torch.empty((rows, weight.in_features), dtype=dtype, device=weight.words.device)
    zeros = weight.zeros
    _dequantize_kernel[(cdiv(weight.in_features, step), cdiv(rows, ROWS))](
        weight.words,
        readable(weight.scales),
        zeros,
        weight.factors,
        weight.blocks,
        chosen,
        out,
        rows,
        weight.in_features,
        weight.words.shape[1],
        groups,
        *weight.scales.stride(),
        *((None, None) if zeros is None else zeros.stride()),
        NUMBERS=weight.numbers,
        PER_WORD=32 // BITS[weight.numbers],
        GROUP=step if groups == 1 else weight.group,
        PER_BLOCK=(weight.block or 0) // weight.group,
        ROWS=ROWS,
        STEP=step,
        **launch_options(out),
    )
    return out


@triton.jit
def _dequantize_kernel(
    words_ptr,
    scales_ptr,
    zeros_ptr,
    factors_ptr,
    blocks_ptr,
    chosen_ptr,
    out_ptr,
    rows,
    in_features,
    row_words,
    groups,
    scales_row,
    scales_group,
    zeros_row,
    zeros_group,
    NUMBERS: tl.constexpr,
    PER_WORD: tl.constexpr,
    GROUP: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    EARLY: tl.constexpr,
):
    GROUPS: tl.constexpr = max(STEP // GROUP, 1)
    place = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    n = tl.minimum(place, rows - 1).to(tl.int64)[:, None]
    to = n
    if chosen_ptr is not None:
        wait_for_predecessor(EARLY)
        n = tl.load(chosen_ptr + n).to(tl.int64)
    word = tl.program_id(0) * (STEP // PER_WORD) + tl.arange(0, STEP // PER_WORD)
    words = tl.load(words_ptr + n * row_words + word[None, :], mask=(word < row_words)[None, :], other=0)
    group = tl.minimum(tl.program_id(0) * STEP // GROUP + tl.arange(0, GROUPS), groups - 1)[None, :]
    factors = widen(tl.load(scales_ptr + n * scales_row + group * scales_group))
    if factors_ptr is not None:
        factors *= tl.load(factors_ptr + n)
    numbers = tl.reshape(unpack_tile(words, None, None, NUMBERS, tl.float32, False), [ROWS, GROUPS, STEP // GROUPS])
    zeros, ones, of_blocks = None, None, None
    if PER_BLOCK > 0:
        block = n * (groups // PER_BLOCK) + group // PER_BLOCK
        of_blocks = load_factors(blocks_ptr, block, zeros_ptr is not None)[:, :, None]
    if zeros_ptr is not None:
        zeros, ones = tl.load(zeros_ptr + n * zeros_row + group * zeros_group)[:, :, None], 1.0
    out = tl.reshape(
        scale_dots(numbers, ones, factors[:, :, None], zeros, NUMBERS, middle_of(NUMBERS), of_blocks), [ROWS, STEP]
    )
    k = tl.program_id(0) * STEP + tl.arange(0, STEP)
    mask = (place < rows)[:, None] & (k < in_features)[None, :]
    if chosen_ptr is None:
        wait_for_predecessor(EARLY)  # which may still read the memory of this copy
    tl.store(out_ptr + to * in_features + k[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)
