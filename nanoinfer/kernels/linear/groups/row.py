"""How the kernel for a single token multiplies a tile of a GroupWeight.

The token's vector is float32, as are all numbers and sums. Integers count from 0. What they have too much, such as a
zero, multiplies a group's sum of the vector, which is the same for all rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.groups import BITS, BITSANDBYTES, GroupWeight, Numbers
from nanoinfer.kernels.launch import next_power_of_2
from nanoinfer.kernels.linear.activation import gated_row
from nanoinfer.kernels.linear.groups.scales import load_factors, readable, scale_dots
from nanoinfer.kernels.linear.operands.operand import RowOperand
from nanoinfer.kernels.linear.operands.plain import load_bias, load_rows
from nanoinfer.kernels.unpacking import bits_of, dot_words, middle_of, split_places

BLOCK = 32  # inputs; a whole number of groups.pack's blocks
TILE = 1 << 14  # bytes of a program's load, but for what fills no tile of two rows
BYTES_PER_SM = 1 << 16  # that are on their way at a time
LONG = 8192  # inputs; of more, the vector takes many registers


def has_row_kernel(weight: GroupWeight) -> bool:
    """Return whether the kernel can multiply a single token by the weight."""
    group, is_one = weight.group, weight.scales.shape[1] == 1
    in_groups = is_one or (group & group - 1 == 0 and group >= 16)
    return in_groups and weight.in_features % BLOCK == 0


class GroupRowParts(NamedTuple):
    """What the functions read of a GroupWeight: its tensors, and strides."""

    numbers: Tensor
    scales: Tensor
    zeros: Tensor | None
    factors: Tensor | None
    blocks: Tensor | None
    scales_row: int
    scales_group: int
    zeros_row: int | None
    zeros_group: int | None


@dataclass(frozen=True)
class GroupRowForm:
    """What the functions are compiled for; numbers, group: of groups.GroupWeight; native: by a GPU's instructions

    per_block: the groups of a block that has factors; 0: none has any
    """

    numbers: Numbers
    group: int
    native: bool
    has_zeros: bool
    per_block: int


def group_row(weight: GroupWeight, dtype: torch.dtype) -> RowOperand:
    """Return the operand of a weight, such as has_row_kernel says, for a single token's vector of a dtype."""
    words, zeros = weight.words, weight.zeros
    native = words.is_cuda and (dtype != torch.float32 or weight.numbers not in BITSANDBYTES)  # or float16 rounds
    assert words.is_contiguous()
    scales_row, scales_group = weight.scales.stride()
    zeros_row, zeros_group = (None, None) if zeros is None else zeros.stride()
    strides = scales_row, scales_group, zeros_row, zeros_group
    parts = GroupRowParts(words, readable(weight.scales), zeros, weight.factors, weight.blocks, *strides)
    form = GroupRowForm(weight.numbers, weight.group, native, zeros is not None, (weight.block or 0) // weight.group)
    block_k = next_power_of_2(weight.in_features)
    row = block_k * BITS[weight.numbers] // 8  # bytes
    takes_registers = weight.blocks is not None or weight.numbers in BITSANDBYTES
    rows = max(TILE // (2 * row if takes_registers else row), 2)
    is_small = rows * row <= TILE and block_k <= LONG
    programs = (rows, BYTES_PER_SM // TILE, 4) if is_small else (rows, 2, 8)
    functions = _load_tile, _load_scales, _prepare, _multiply
    return RowOperand(parts, form, *functions, len(words), weight.in_features, programs, None)


@triton.jit
def _load_tile(parts, first_row, tile, in_features, weight_rows, HOW: tl.constexpr):
    """See linear.plain.load_row_tile; [block_n, words] int32."""
    PER_WORD: tl.constexpr = 32 // bits_of(HOW.form.numbers)
    width = tl.multiple_of(in_features // PER_WORD, 4)
    return load_rows(parts.numbers, first_row, tile, width, width, weight_rows, HOW.block_k // PER_WORD, HOW)


@triton.jit
def _load_scales(parts, first_row, tile, in_features, weight_rows, HOW: tl.constexpr):
    """Load the scales of what _load_tile loads, its zeros and its blocks' factors, [block_n, groups] each."""
    scales = _load_groups(
        parts.scales, parts.scales_row, parts.scales_group, first_row, tile, in_features, weight_rows, HOW
    )
    zeros, factors = 0, 0  # there may be none
    if HOW.form.has_zeros:
        zeros = _load_groups(
            parts.zeros, parts.zeros_row, parts.zeros_group, first_row, tile, in_features, weight_rows, HOW
        )
    if HOW.form.per_block > 0:
        row, group, mask = _groups_of(first_row, tile, in_features, weight_rows, HOW)
        SPAN: tl.constexpr = HOW.form.per_block * HOW.form.group
        block = row * (in_features // SPAN) + group // HOW.form.per_block
        factors = load_factors(parts.blocks, block, HOW.form.has_zeros, mask)
    return scales, zeros, factors


@triton.jit
def _load_groups(ptr, row_stride, group_stride, first_row, tile, in_features, weight_rows, HOW: tl.constexpr):
    """Load what the groups of a tile's rows have, as it is, [block_n, groups]."""
    row, group, mask = _groups_of(first_row, tile, in_features, weight_rows, HOW)
    return tl.load(ptr + row * row_stride + group * group_stride, mask=mask)


@triton.jit
def _groups_of(first_row, tile, in_features, weight_rows, HOW: tl.constexpr):
    """Return a tile's rows, [block_n, 1], its groups, [1, groups], and which of the rows are any."""
    GROUP: tl.constexpr = HOW.form.group
    GROUPS: tl.constexpr = HOW.block_k // GROUP if HOW.block_k > GROUP else 1
    n, group = tile * HOW.block_n + tl.arange(0, HOW.block_n), tl.arange(0, GROUPS)
    mask = (n < weight_rows)[:, None]
    if HOW.activation is not None:
        n = gated_row(n, weight_rows)
    return (first_row + n)[:, None], tl.minimum(group, in_features // GROUP - 1)[None, :], mask


@triton.jit
def _prepare(x, HOW: tl.constexpr):
    """Return the token's vector as multiply_words wants it, and its groups' sums if the numbers are integers."""
    NUMBERS: tl.constexpr = HOW.form.numbers
    SIZE: tl.constexpr = HOW.block_k
    GROUPS: tl.constexpr = SIZE // HOW.form.group if HOW.form.group < SIZE else 1
    wide = x.to(tl.float32)
    sums = tl.sum(tl.reshape(wide, [GROUPS, SIZE // GROUPS]), axis=1) if middle_of(NUMBERS) > 0 else 0.0
    return split_places(wide, SIZE, NUMBERS), sums


@triton.jit
def _multiply(parts, tile, vector, scales, first_row, index, weight_rows, HOW: tl.constexpr):
    NUMBERS: tl.constexpr = HOW.form.numbers
    GROUP: tl.constexpr = HOW.form.group
    GROUPS: tl.constexpr = HOW.block_k // GROUP if HOW.block_k > GROUP else 1
    HALVES: tl.constexpr = 64 // bits_of(NUMBERS) == GROUP
    places, sums = vector
    own, zeros, factors = scales
    if not HOW.form.has_zeros:
        zeros = None
    if HOW.form.per_block == 0:
        factors = None
    NATIVE: tl.constexpr = HOW.form.native
    dots = multiply_words(tile, places, sums, own, zeros, factors, NUMBERS, HOW.block_n, GROUPS, HALVES, NATIVE)
    if parts.factors is not None:
        GATED: tl.constexpr = HOW.activation is not None
        dots *= load_bias(parts.factors + first_row, index, weight_rows, HOW.block_n, GATED)
    return dots


@triton.jit
def multiply_words(
    tile,
    places,
    sums,
    scales,
    zeros,
    factors,
    NUMBERS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    HALVES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Return the products of a tile's rows with a token's vector, [BLOCK_N] float32, but for the rows' factors.

    tile: [BLOCK_N, words] int32; places, sums: from _prepare; scales, zeros, factors: from _load_scales
    HALVES: the halves of a block are different groups
    """
    WORDS: tl.constexpr = tile.shape[1]
    MOST: tl.constexpr = 32 // bits_of(NUMBERS)
    if HALVES:
        halves = tl.join(
            dot_words(tile, places, NUMBERS, 0, MOST // 2, NATIVE),
            dot_words(tile, places, NUMBERS, MOST // 2, MOST, NATIVE),
        )
        of_groups = tl.reshape(tl.sum(tl.reshape(halves, [BLOCK_N, WORDS // 4, 4, 2]), axis=2), [BLOCK_N, GROUPS])
    else:
        dots = dot_words(tile, places, NUMBERS, 0, MOST, NATIVE)
        of_groups = tl.sum(tl.reshape(dots, [BLOCK_N, GROUPS, WORDS // GROUPS]), axis=2)
    if middle_of(NUMBERS) > 0:
        sums = sums[None, :]
    return tl.sum(scale_dots(of_groups, sums, scales, zeros, NUMBERS, 0, factors), axis=1)
