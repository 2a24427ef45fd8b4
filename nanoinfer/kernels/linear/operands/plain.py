"""A plain weight, of floating-point numbers, as the kernels' operand."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import fetch_rows, next_power_of_2, wait_for_predecessor
from nanoinfer.kernels.linear.activation import gated_row
from nanoinfer.kernels.linear.operands.operand import Operand, RowOperand
from nanoinfer.kernels.linear.tiles import load_block

LINE_BITS = tl.constexpr(1024)
MIN_TILE = 8192  # numbers per load of a program of one row; at least two of its rows, or reductions cost more
PER_MULTIPROCESSOR = 4 * MIN_TILE  # numbers that are on their way at a time
LOAD = 16  # bytes that a thread loads at once


def plain_operand(weight: Tensor) -> Operand:
    """Return the operand of a weight, [out_features, in_features], or of experts' weights."""
    assert weight.is_contiguous()
    return Operand(weight, None, None, add_products, weight.shape[-2], weight.shape[-1], apart=True)


@triton.jit
def add_products(x_source, numbers, product, tile, room, HOW: tl.constexpr, EARLY: tl.constexpr):
    """Return the products of a tile, and, with an activation, those of the ups, if they are apart from the gates.

    A format has such a function, which waits for the predecessor before it reads x. The products are float32,
    [vectors, rows] if parts are apart and there are 64 vectors or more, else [rows, vectors]. If parts are apart, the
    ups are product.rows behind the gates.
    x_source, numbers: the vectors and the weight's, or descriptors of them; product: a tiles.Product
    tile: a tiles.Tile; room: of the scales of x, in vectors; HOW: tiles.TileConstants
    """
    GATED: tl.constexpr = HOW.activation is not None
    M: tl.constexpr = HOW.block_m
    N: tl.constexpr = HOW.block_n
    in_features = product.in_features
    to_ups = tl.full([], product.rows, tl.int64) * in_features
    if HOW.fetched > 0:
        COUNT: tl.constexpr = HOW.fetched * LINE_BITS // numbers.dtype.element_ty.primitive_bitwidth
        fetch_rows(numbers, tile.rows, tile.end_row, in_features, tile.begin, COUNT, EARLY)
        if GATED:
            fetch_rows(numbers + to_ups, tile.rows, tile.end_row, in_features, tile.begin, COUNT, EARLY)
    wait_for_predecessor(EARLY)

    # Tensor cores need at least 64 rows in the left matrix: with fewer tokens, the weight is the left one.
    TOKENS_LEFT: tl.constexpr = HOW.block_m >= 64
    acc = tl.zeros([M, N] if TOKENS_LEFT else [N, M], tl.float32)
    up_acc = tl.zeros([M, N] if TOKENS_LEFT else [N, M], tl.float32)
    k = tl.arange(0, HOW.block_k)
    x_ptrs = x_source + tile.sources.to(tl.int64)[:, None] * in_features + k[None, :]
    ptrs = numbers + tile.rows[:, None] * in_features + k[None, :]
    for start in range(tile.begin, tile.stop, HOW.block_k):
        inside = k < in_features - start
        x = load_block(x_ptrs + start, tile.exists, inside, False, HOW.whole)
        weight = load_block(ptrs + start, tile.has_row, inside, HOW.full, HOW.whole)
        acc = add_product(acc, x, weight, TOKENS_LEFT)
        if GATED:
            ups = load_block(ptrs + start + to_ups, tile.has_row, inside, HOW.full, HOW.whole)
            up_acc = add_product(up_acc, x, ups, TOKENS_LEFT)
    return acc, up_acc


@triton.jit
def add_product(acc, x, weight, TOKENS_LEFT: tl.constexpr):
    """Add x @ weight.T to acc, or if not TOKENS_LEFT, weight @ x.T; float32 stays float32."""
    return (
        tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
        if TOKENS_LEFT
        else tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
    )


def plain_row(weight: Tensor) -> RowOperand:
    """Return the operand of a weight for a single token."""
    assert weight.is_contiguous()
    *_, rows, in_features = weight.shape
    row = next_power_of_2(in_features)
    tile = max(MIN_TILE, 2 * row)
    programs = tile // row, max(PER_MULTIPROCESSOR // tile, 1), 8 if tile == MIN_TILE else 16
    functions = load_row_tile, None, _prepare, _multiply
    return RowOperand(PlainParts(weight), None, *functions, rows, in_features, programs, LOAD // weight.itemsize)


class PlainParts(NamedTuple):
    """All that the kernel for one row reads of a weight."""

    numbers: Tensor


@triton.jit
def load_row_tile(parts, first_row, tile, in_features, weight_rows, HOW: tl.constexpr):
    """Load the rows of a tile, [block_n, block_k]. Each gate's row comes before its up's, if there is an activation.

    first_row: of the matrix among those of all experts, int64; HOW: one_row.RowConstants
    """
    return load_rows(parts.numbers, first_row, tile, in_features, in_features, weight_rows, HOW.block_k, HOW)


@triton.jit
def load_rows(ptr, first_row, tile, width, stride, weight_rows, COLUMNS: tl.constexpr, HOW: tl.constexpr):
    """Load [block_n, COLUMNS] of a tile's rows, of which `width` columns are any."""
    N: tl.constexpr = HOW.block_n
    n, k = tile.to(tl.int64) * N + tl.arange(0, N), tl.arange(0, COLUMNS)
    mask = (n < weight_rows)[:, None] & (k < width)[None, :]
    if HOW.activation is not None:
        n = gated_row(n, weight_rows)
    return tl.load(ptr + (first_row + n)[:, None] * stride + k[None, :], mask=mask, other=0.0)


@triton.jit
def load_bias(bias_ptr, tile, weight_rows, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """Load the biases of a tile's rows, in the tile's order, as float32."""
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = n < weight_rows
    if GATED:
        n = gated_row(n, weight_rows)
    return tl.load(bias_ptr + n, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _prepare(x, HOW: tl.constexpr):
    return x.to(tl.float32)


@triton.jit
def _multiply(parts, tile, x, scales, first_row, index, weight_rows, HOW: tl.constexpr):
    """Return the products of a tile's rows with x, [block_n] float32; index: the tile's."""
    return tl.sum(tile.to(tl.float32) * x[None, :], axis=1)
