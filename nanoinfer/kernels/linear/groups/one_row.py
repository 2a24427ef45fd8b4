"""The product of a single token's vector and a GroupWeight, where nothing comes before it.

kernels.linear.one_row, which normalises the vector first, holds all of it in registers. A long vector takes many, and
those of a size that is no power of two are partly empty. Here a program goes along some rows, a part of the inputs at a
time. The L2 cache fetches the rows while the kernel before still runs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.groups import BITS, GroupWeight
from nanoinfer.kernels.launch import cdiv, fetch, launch_options, next_power_of_2, wait_for_predecessor
from nanoinfer.kernels.linear.activation import Activation, gated_row
from nanoinfer.kernels.linear.groups.scales import load_factors, readable, scale_dots
from nanoinfer.kernels.linear.one_row import store_dots
from nanoinfer.kernels.linear.operands.plain import load_bias
from nanoinfer.kernels.unpacking import dot_words, load_places, middle_of

ROWS, INPUTS, WARPS = 8, 4096, 4  # of a program: rows of the weight, and inputs at a time
LINE = tl.constexpr(32)  # words that the L2 cache fetches at once


def can_multiply_row(weight: GroupWeight) -> bool:
    """Return whether group_row_linear multiplies by the weight."""
    block = 128 // BITS[weight.numbers]
    return weight.in_features % block == 0 and (weight.group % block == 0 or weight.group == block // 2)


def group_row_linear(
    x: Tensor, weight: GroupWeight, bias: Tensor | None = None, activation: Activation | None = None
) -> Tensor:
    """Compute kernels.linear.dispatch.linear for x of [1, in_features], in one launch; see can_multiply_row."""
    assert x.is_contiguous()
    assert weight.words.is_contiguous()
    weight_rows, row_words = weight.words.shape
    out = torch.empty((1, weight_rows // 2 if activation else weight_rows), dtype=x.dtype, device=x.device)
    zeros, per_word = weight.zeros, 32 // BITS[weight.numbers]
    inputs = min(INPUTS * per_word // 8, next_power_of_2(weight.in_features))
    _group_row_kernel[(cdiv(weight_rows, ROWS),)](
        x,
        weight.words,
        readable(weight.scales),
        zeros,
        weight.factors,
        weight.blocks,
        bias,
        out,
        weight_rows,
        row_words,
        *weight.scales.stride(),
        *((None, None) if zeros is None else zeros.stride()),
        NUMBERS=weight.numbers,
        PER_WORD=per_word,
        GROUP=weight.group,
        PER_BLOCK=(weight.block or 0) // weight.group,
        ACTIVATION=activation,
        NATIVE=x.is_cuda,
        BLOCK_N=ROWS,
        BLOCK_K=inputs,
        LINES=next_power_of_2(cdiv(row_words, LINE.value)),
        num_warps=WARPS,
        **launch_options(x),
    )
    return out


@triton.jit
def _group_row_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    zeros_ptr,
    factors_ptr,
    blocks_ptr,
    bias_ptr,
    out_ptr,
    weight_rows,
    row_words,
    scales_row,
    scales_group,
    zeros_row,
    zeros_group,
    NUMBERS: tl.constexpr,
    PER_WORD: tl.constexpr,
    GROUP: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LINES: tl.constexpr,
    EARLY: tl.constexpr,
):
    GATED: tl.constexpr = ACTIVATION is not None
    WORDS: tl.constexpr = BLOCK_K // PER_WORD
    PARTS: tl.constexpr = 2 if GROUP == 2 * PER_WORD else 1  # of a block, which are different groups
    PER_PART: tl.constexpr = PER_WORD // PARTS
    first = tl.program_id(0) * BLOCK_N
    n = tl.minimum(first + tl.arange(0, BLOCK_N), weight_rows - 1)
    if GATED:
        n = gated_row(n, weight_rows)
    n = n.to(tl.int64)[:, None]
    row_ptrs, word = words_ptr + n * row_words, tl.arange(0, WORDS)[None, :]
    words = tl.load(row_ptrs + word, mask=word < row_words, other=0)
    line = tl.arange(0, LINES)[None, :] * LINE
    fetch(row_ptrs + tl.minimum(line, row_words - 1), EARLY)
    wait_for_predecessor(EARLY)

    acc = tl.zeros([BLOCK_N, WORDS // 4], tl.float32)
    for start in range(0, row_words, WORDS):
        ahead = start + WORDS + word
        following = tl.load(row_ptrs + ahead, mask=ahead < row_words, other=0)
        xs = load_places(x_ptr, start, row_words, WORDS, NUMBERS, NATIVE)
        block = tl.minimum(start // 4 + tl.arange(0, WORDS // 4), row_words // 4 - 1)[None, :]
        for part in tl.static_range(PARTS):
            group = (block * PARTS + part) * (4 * PER_WORD // PARTS) // GROUP
            dots = dot_words(words, xs, NUMBERS, part * PER_PART, (part + 1) * PER_PART, NATIVE)
            dots = tl.sum(tl.reshape(dots, [BLOCK_N, WORDS // 4, 4]), axis=2)
            zeros, sums, of_blocks = None, None, None
            if PER_BLOCK > 0:
                groups = row_words * PER_WORD // GROUP
                at = n * (groups // PER_BLOCK) + group // PER_BLOCK
                of_blocks = load_factors(blocks_ptr, at, zeros_ptr is not None)
            if zeros_ptr is not None:
                zeros = tl.load(zeros_ptr + n * zeros_row + group * zeros_group)
            if middle_of(NUMBERS) > 0:
                sums = _sum_places(xs, part * PER_PART, PER_PART)
            scales = tl.load(scales_ptr + n * scales_row + group * scales_group)
            acc += scale_dots(dots, sums, scales, zeros, NUMBERS, 0, of_blocks)
        words = following

    dots = tl.sum(acc, axis=1)
    tile = tl.program_id(0)
    if factors_ptr is not None:
        dots *= load_bias(factors_ptr, tile, weight_rows, BLOCK_N, GATED)
    if bias_ptr is not None:
        dots += load_bias(bias_ptr, tile, weight_rows, BLOCK_N, GATED)
    store_dots(dots.to(out_ptr.dtype.element_ty), out_ptr, tile * BLOCK_N, weight_rows, ACTIVATION, BLOCK_N)


@triton.jit
def _sum_places(xs, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Return each block's sum of the vector's numbers at some places of its words, [1, blocks]."""
    sums = xs[FIRST]
    for place in tl.static_range(FIRST + 1, FIRST + COUNT):
        sums += xs[place]
    return tl.sum(tl.reshape(sums, [sums.shape[0] // 4, 4]), axis=1)[None, :]
