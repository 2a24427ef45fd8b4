"""Keys and values in eight bits (the e4m3 of Micikevicius et al., 2022): a cache of half the bytes.

A cached number times the layer's scale, one for keys and one for values, is the key's or the value's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.fp8 import FP8, LARGEST, as_bytes, round_to_fp8

LANES = tl.constexpr(8)  # of a program whose queries are in two terms: it has no more heads
LEAST_KEYS = 64  # that tensor cores multiply at once in FP8
SMALLEST_HEAD = 17  # tensor cores multiply 32 numbers of a head at once; smaller ones are padded to 16
LARGEST_HEAD = 128  # of larger heads, four warps would lack registers


def put(cache: Tensor, slots: tuple[Tensor, Tensor], x: Tensor, scale: Tensor | None) -> None:
    """Write keys or values into their places of a cache.

    cache: [blocks, block_size, kv_heads, head_dim], FP8 or of x's dtype
    slots: blocks, and places in them, [tokens] each; x: [tokens, kv_heads, head_dim]
    scale: [] float32, for FP8
    """
    if cache.dtype != FP8:
        cache[slots] = x
        return
    assert scale is not None
    as_bytes(cache)[slots] = as_bytes((x.float() / scale).clamp_(-LARGEST, LARGEST).to(FP8))


def read(cached: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """Return numbers of a cache in the model's dtype; scale: [] float32, for FP8."""
    if cached.dtype != FP8:
        return cached
    assert scale is not None
    return (cached.float() * scale).to(dtype)


def can_split(q: Tensor, k_cache: Tensor, tile: int) -> bool:
    """Return whether a decode kernel can multiply keys by two terms of the queries, see narrow_queries.

    q: [rows, heads, head_dim]; k_cache: [blocks, block_size, kv_heads, head_dim]; tile: keys at once
    """
    _, heads, head_dim = q.shape
    fits = heads // k_cache.shape[2] <= LANES.value and SMALLEST_HEAD <= head_dim <= LARGEST_HEAD and tile >= LEAST_KEYS
    return fits and k_cache.dtype == FP8 and q.dtype == torch.bfloat16


@triton.jit
def narrow_queries(q, IN_TERMS: tl.constexpr):
    """Return queries as products with keys in FP8 want them, and the unit that they are in, of each.

    q: [lanes, head_dim] bfloat16; if IN_TERMS, [2 * LANES, head_dim], whose halves are equal
    Returns [lanes, head_dim] float16 and [lanes] float32; or if IN_TERMS two terms in FP8, one in each half, which add
    up to the query, and [LANES] float32.

    A GPU converts FP8 to float16 twice as fast as to bfloat16; float16 holds queries of at most 1 well. With two terms
    it need not convert keys: a bfloat16 has eight bits, an FP8 number four. So the second term holds what the first
    leaves, and only numbers below 1/512 of the largest lose bits.
    """
    wide = q.to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(wide), axis=1), 1e-30)
    if IN_TERMS:
        exponent = (largest.to(tl.int32, bitcast=True) & 0x7F800000) - (7 << 23)  # the largest becomes 128 to 256
        unit = exponent.to(tl.float32, bitcast=True)
        nothing = tl.sum(wide * 0.0, axis=1)  # NaN if some number is infinite or NaN, which terms need not be
        wide = wide / unit[:, None]
        first = round_to_fp8(wide)
        is_first = tl.arange(0, 2 * LANES) < LANES
        terms = tl.where(is_first[:, None], first, round_to_fp8(wide - first))
        return terms.to(tl.float8e4nv), tl.max(tl.reshape(unit + nothing, [2, LANES]), axis=0)
    else:
        return (wide / largest[:, None]).to(tl.float16), largest


@triton.jit
def multiply_keys(q, k, IN_TERMS: tl.constexpr):
    """Return the products of what narrow_queries returns and keys: [lanes, keys], if IN_TERMS [keys, LANES]."""
    if IN_TERMS:
        return tl.sum(tl.reshape(tl.dot(k, tl.trans(q)), [k.shape[0], 2, LANES]), axis=1)
    else:
        return tl.dot(q, tl.trans(k), input_precision="ieee")


@triton.jit
def twice(x):
    """Repeat x, [LANES] or [keys, LANES], along its last axis."""
    if len(x.shape) == 1:
        return tl.reshape(tl.broadcast_to(x[None, :], [2, LANES]), [2 * LANES])
    else:
        keys: tl.constexpr = x.shape[0]
        return tl.reshape(tl.broadcast_to(x[:, None, :], [keys, 2, LANES]), [keys, 2 * LANES])


@triton.jit
def load_halves(ptr, offsets, mask, dtype: tl.constexpr, ON_GPU: tl.constexpr):
    """Load pairs of neighbouring FP8 numbers; return the first numbers of all pairs, and the second ones, in `dtype`.

    offsets: of the pairs, in pairs. A product needs values in another order than memory has them. On its way from
    shared memory a GPU reorders 16-bit words alone: so a pair travels as one.
    """
    pairs = tl.load(ptr.to(tl.pointer_type(tl.int16)) + offsets, mask=mask, other=0)
    if ON_GPU:
        # The compiler would take the bytes apart one by one, where these are three instructions for four numbers.
        first, second = tl.inline_asm_elementwise(
            """
            {
                .reg .b32 sorted;
                .reg .b16 firsts, seconds;
                prmt.b32 sorted, $2, 0, 0x3120;
                mov.b32 {firsts, seconds}, sorted;
                cvt.rn.f16x2.e4m3x2 $0, firsts;
                cvt.rn.f16x2.e4m3x2 $1, seconds;
            }
            """,
            constraints="=r,=r,r",
            args=[pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        first = (pairs & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        second = ((pairs >> 8) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return first.to(dtype), second.to(dtype)
