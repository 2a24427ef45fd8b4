"""Keys and values in eight bits (the e4m3 of Micikevicius et al., 2022): a cache of half the bytes.

A cached number times the layer's scale, one for keys and one for values, is the key's or the value's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.fp8 import FP8, LARGEST, as_bytes


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
