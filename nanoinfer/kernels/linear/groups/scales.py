"""The scales of a GroupWeight inside a kernel: loaded as they are, widened where they are used."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def widen(scales):
    """Return scales of any type as float32, exactly; a byte is a power of two, with 127 added."""
    if scales.dtype == tl.uint8:
        bits = tl.where(scales == 0, 1 << 22, scales.to(tl.int32) << 23)  # 2^-127 has no exponent of its own
        return bits.to(tl.float32, bitcast=True)
    else:
        return scales.to(tl.float32)


@triton.jit
def narrow(scales, DTYPE: tl.constexpr):
    """Return scales of eight bits as numbers of DTYPE, exactly, without a conversion on the way if it has 16 bits."""
    if tl.float32 == DTYPE:
        return widen(scales)
    elif scales.dtype == tl.uint8:
        tl.static_assert(tl.bfloat16 == DTYPE)
        bits = tl.where(scales == 0, 1 << 6, scales.to(tl.int16) << 7)
        return bits.to(tl.int16).to(DTYPE, bitcast=True)
    else:
        byte = scales.to(tl.uint8, bitcast=True).to(tl.int16)
        IS_BF16: tl.constexpr = tl.bfloat16 == DTYPE
        bits = (byte & 0x7F) << (4 if IS_BF16 else 7) | (byte & 0x80) << 8  # their exponents have other zeros
        return bits.to(tl.int16).to(DTYPE, bitcast=True) * (2.0**120 if IS_BF16 else 2.0**8)
