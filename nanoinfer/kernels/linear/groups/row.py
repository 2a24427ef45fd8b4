"""How the kernel for a single token multiplies a tile of a GroupWeight.

The token's vector is float32, as are all numbers and sums. A zero multiplies a group's sum of the vector, which is the
same for all rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nanoinfer.kernels.groups import BITS, GroupWeight
from nanoinfer.kernels.linear.activation import gated_row
from nanoinfer.kernels.linear.groups.scales import widen
from nanoinfer.kernels.unpacking import dot_words, split_places

BLOCK = 32  # inputs; a whole number of groups.pack's blocks
TILE = 1 << 14  # bytes of a program's load, but for what fills no tile of two rows
BYTES_PER_SM = 1 << 16  # that are on their way at a time
LONG = 8192  # inputs; of more, the vector takes many registers


def has_row_kernel(weight: GroupWeight) -> bool:
    """Return whether the kernel can multiply a single token by the weight."""
    group, is_one = weight.group, weight.scales.shape[1] == 1
    in_groups = is_one or (group & group - 1 == 0 and group >= 16)
    return in_groups and weight.in_features % BLOCK == 0


def choose_group_programs(block_k: int, weight: GroupWeight) -> tuple[int, int, int]:
    """Return the rows of a tile, the programs for each multiprocessor, and the warps of a program."""
    row = block_k * BITS[weight.numbers] // 8  # bytes
    rows = max(TILE // row, 2)
    return (rows, BYTES_PER_SM // TILE, 4) if rows * row <= TILE and block_k <= LONG else (rows, 2, 8)


@triton.jit
def prepare_places(x, SIZE: tl.constexpr, GROUPS: tl.constexpr, NUMBERS: tl.constexpr, ZEROS: tl.constexpr):
    """Return the token's vector x, [SIZE], as multiply_words wants it, and its groups' sums if there are zeros."""
    wide = x.to(tl.float32)
    sums = tl.sum(tl.reshape(wide, [GROUPS, SIZE // GROUPS]), axis=1) if ZEROS else 0.0
    return split_places(wide, SIZE, NUMBERS), sums


@triton.jit
def load_of_groups(
    ptr,
    row_stride,
    group_stride,
    tile,
    groups,
    weight_rows,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    GATED: tl.constexpr,
):
    """Load the scales, or the zeros, of what one_row.load_tile loads, as they are, [BLOCK_N, GROUPS]."""
    n, group = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, GROUPS)
    mask = (n < weight_rows)[:, None]
    if GATED:
        n = gated_row(n, weight_rows)
    of_group = tl.minimum(group, groups - 1) * group_stride
    return tl.load(ptr + n.to(tl.int64)[:, None] * row_stride + of_group[None, :], mask=mask)


@triton.jit
def multiply_words(
    tile,
    places,
    sums,
    scales,
    zeros,
    NUMBERS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    HALVES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Return the products of a tile's rows with a token's vector, [BLOCK_N] float32, but for the rows' factors.

    tile: [BLOCK_N, words] int32; places, sums: from prepare_places; scales, zeros: from load_of_groups
    HALVES: the halves of a block are different groups
    """
    WORDS: tl.constexpr = tile.shape[1]
    MOST: tl.constexpr = 4 if NUMBERS == "int8" else 8
    if HALVES:
        halves = tl.join(
            dot_words(tile, places, None, NUMBERS, 0, MOST // 2, NATIVE),
            dot_words(tile, places, None, NUMBERS, MOST // 2, MOST, NATIVE),
        )
        of_groups = tl.reshape(tl.sum(tl.reshape(halves, [BLOCK_N, WORDS // 4, 4, 2]), axis=2), [BLOCK_N, GROUPS])
    else:
        dots = dot_words(tile, places, None, NUMBERS, 0, MOST, NATIVE)
        of_groups = tl.sum(tl.reshape(dots, [BLOCK_N, GROUPS, WORDS // GROUPS]), axis=2)
    if zeros is not None:
        of_groups -= (zeros.to(tl.float32) - (128.0 if NUMBERS == "int8" else 8.0)) * sums[None, :]
    return tl.sum(of_groups * widen(scales), axis=1)
