"""What a program of kernels.decoder.row computes of a layer: its share of a product, of heads, of keys."""

from __future__ import annotations

import triton
import triton.language as tl

from nanoinfer.kernels.decoder.words import receive

WAVE = tl.constexpr(256)  # neighbours in a row of a weight that a warp loads at once
ADDRESSES = tl.constexpr(16)  # of a layer, in the table


@triton.jit
def address(table_ptr, layer, WHICH: tl.constexpr, dtype: tl.constexpr):
    """Return where one of a layer's tensors begins."""
    return tl.multiple_of(tl.load(table_ptr + layer * ADDRESSES + WHICH).to(tl.pointer_type(dtype)), 16)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Round float32 numbers to the model's dtype."""
    return x.to(dtype).to(tl.float32)


@triton.jit
def places_of(pages_ptr, key, mask, kv_head, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Return where keys' numbers lie in the cache, [keys, HEAD_DIM]."""
    page = tl.load(pages_ptr + key // BLOCK_SIZE, mask=mask, other=0).to(tl.int64)
    first = ((page * BLOCK_SIZE + key % BLOCK_SIZE) * KV_HEADS + kv_head) * HEAD_DIM
    return first[:, None] + tl.arange(0, HEAD_DIM)[None, :]


@triton.jit
def load_share(weight_ptr, first, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load ROWS rows of a weight, as WIDTH / BLOCK tiles of [ROWS, BLOCK / WAVE, WAVE]: a warp loads whole rows."""
    r, wave = tl.arange(0, ROWS), tl.arange(0, BLOCK // WAVE)
    places = (first + r).to(tl.int64)[:, None, None] * WIDTH + wave[None, :, None] * WAVE
    places += tl.arange(0, WAVE)[None, None, :]
    tiles = tl.tuple(())
    for b in tl.static_range(WIDTH // BLOCK):
        tiles += (tl.load(weight_ptr + b * BLOCK + places),)
    return tiles


@triton.jit
def load_tiles(weight_ptr, first, ROWS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """Load ROWS rows of a weight, as ROWS / TILE tiles of [TILE, WIDTH / WAVE, WAVE]."""
    tiles = tl.tuple(())
    for t in tl.static_range(ROWS // TILE):
        tiles += load_share(weight_ptr, first + t * TILE, TILE, WIDTH, WIDTH)
    return tiles


@triton.jit
def receive_blocks(ptr, turn, WIDTH: tl.constexpr, BLOCK: tl.constexpr, dtype: tl.constexpr):
    """Wait for a product's input; returns WIDTH / BLOCK blocks of it, [BLOCK / WAVE, WAVE]."""
    ptrs = tl.tuple(())
    for b in tl.static_range(WIDTH // BLOCK):
        ptrs += (ptr + b * BLOCK + tl.arange(0, BLOCK),)
    numbers = receive(ptrs, turn)
    xs = tl.tuple(())
    for b in tl.static_range(WIDTH // BLOCK):
        xs += (tl.reshape(numbers[b].to(dtype), [BLOCK // WAVE, WAVE]),)
    return xs


@triton.jit
def dots(tiles, xs):
    """Return the products of a share's rows with x, [rows] float32; xs: a block of x for each tile"""
    sums = tl.sum(tiles[0].to(tl.float32) * xs[0].to(tl.float32)[None, :, :], axis=1)
    for b in tl.static_range(1, len(tiles)):
        sums += tl.sum(tiles[b].to(tl.float32) * xs[b].to(tl.float32)[None, :, :], axis=1)
    return tl.sum(sums, axis=1)


@triton.jit
def normed(h, weight, eps, HIDDEN: tl.constexpr, dtype: tl.constexpr):
    """normalize of h, float32 [HIDDEN]."""
    scale = tl.rsqrt(tl.sum(h * h, axis=0) / HIDDEN + eps)
    return (rounded(h * scale, dtype) * weight.to(tl.float32)).to(dtype)


@triton.jit
def turned(own, partner, weight, partner_weight, cos, sin, eps, HEAD_DIM: tl.constexpr, dtype: tl.constexpr):
    """Normalise and rotate heads, [heads, HEAD_DIM] float32; partner: each number's, in its pair, whose sign sin has"""
    scale = tl.rsqrt(tl.sum(own * own, axis=1) / HEAD_DIM + eps)[:, None]
    own = rounded(rounded(own * scale, dtype) * weight.to(tl.float32), dtype)
    partner = rounded(rounded(partner * scale, dtype) * partner_weight.to(tl.float32), dtype)
    return own * cos + partner * sin
