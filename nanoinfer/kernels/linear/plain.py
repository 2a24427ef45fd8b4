"""A plain weight, of floating-point numbers, as the tile kernel's operand."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import fetch_rows, wait_for_predecessor
from nanoinfer.kernels.linear.tiles import Operand, load_block

LINE_BITS = tl.constexpr(1024)


def plain_operand(weight: Tensor) -> Operand:
    """Return the operand of a weight, [out_features, in_features], or of experts' weights."""
    assert weight.is_contiguous()
    return Operand(weight, None, None, add_products, weight.shape[-2], weight.shape[-1], apart=True)


@triton.jit
def add_products(product, tile, room, HOW: tl.constexpr, EARLY: tl.constexpr):
    """Return the products of a tile, and, with an activation, those of the ups, if they are apart from the gates.

    A format has such a function, which waits for the predecessor before it reads x. The products are float32,
    [vectors, rows] if parts are apart and there are 64 vectors or more, else [rows, vectors]. If parts are apart, the
    ups are product.rows behind the gates.
    product: a tiles.Product; tile: a tiles.Tile; room: of the scales of x, in vectors; HOW: a tiles.How
    """
    GATED: tl.constexpr = HOW.activation is not None
    M: tl.constexpr = HOW.block_m
    N: tl.constexpr = HOW.block_n
    in_features = product.in_features
    to_ups = tl.full([], product.rows, tl.int64) * in_features
    if HOW.fetched > 0:
        COUNT: tl.constexpr = HOW.fetched * LINE_BITS // product.numbers.dtype.element_ty.primitive_bitwidth
        fetch_rows(product.numbers, tile.rows, tile.end_row, in_features, tile.begin, COUNT, EARLY)
        if GATED:
            fetch_rows(product.numbers + to_ups, tile.rows, tile.end_row, in_features, tile.begin, COUNT, EARLY)
    wait_for_predecessor(EARLY)

    # Tensor cores need at least 64 rows in the left matrix: with fewer tokens, the weight is the left one.
    TOKENS_LEFT: tl.constexpr = HOW.block_m >= 64
    acc = tl.zeros([M, N] if TOKENS_LEFT else [N, M], tl.float32)
    up_acc = tl.zeros([M, N] if TOKENS_LEFT else [N, M], tl.float32)
    k = tl.arange(0, HOW.block_k)
    x_ptrs = product.x + tile.sources.to(tl.int64)[:, None] * in_features + k[None, :]
    ptrs = product.numbers + tile.rows[:, None] * in_features + k[None, :]
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
