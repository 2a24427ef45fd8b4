"""The scales of a GroupWeight inside a kernel: loaded as they are, widened where they are used."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.fp8 import FP8, HAS_FP8, capability
from nanoinfer.kernels.unpacking import middle_of

RAISED = tl.constexpr(62)  # see factors_of; with it, an e2m1 that counts 2^-126 is 2^-64 of what it should be
LOWERED = tl.constexpr(2.0**64)


def readable(scales: Tensor) -> Tensor:
    """Return scales as kernels load them: those in FP8 as int8, if Triton lacks this type for their GPU."""
    return scales.view(torch.int8) if scales.dtype == FP8 and _lacks_fp8(scales.device) else scales


def _lacks_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and capability(device) < HAS_FP8


@triton.jit
def widen(scales):
    """Return scales of any type as float32, exactly; an uint8 is a power of two, with 127 added, an int8 an e4m3."""
    if scales.dtype == tl.uint8:
        bits = tl.where(scales == 0, 1 << 22, scales.to(tl.int32) << 23)  # 2^-127 has no exponent of its own
        return bits.to(tl.float32, bitcast=True)
    elif scales.dtype == tl.int8:
        byte = scales.to(tl.int32)
        bits = (byte & 0x7F) << 20 | (byte & 0x80) << 24
        return bits.to(tl.float32, bitcast=True) * 2.0**120  # their exponents have other zeros
    else:
        return scales.to(tl.float32)


@triton.jit
def scale_dots(dots, sums, scales, zeros, NUMBERS: tl.constexpr, LESS: tl.constexpr = 0, factors=None):
    """Return the products of groups with parts of vectors, float32.

    dots: their numbers' products with them, float32; sums: of the parts, which integers need if LESS is not middle_of
    scales, zeros: of the groups, as a GroupWeight has them
    LESS: integers are so much less than their bits count
    factors: of the groups' blocks, from load_factors; None: 1
    """
    wide = widen(scales)
    if factors is not None:
        wide *= lower_half(factors)
    if zeros is None:
        MIDDLE: tl.constexpr = middle_of(NUMBERS)
        return (dots if MIDDLE == LESS else dots - (MIDDLE - LESS) * sums) * wide
    elif zeros.dtype.is_floating():  # minima
        minima = zeros.to(tl.float32)
        if factors is not None:
            minima *= upper_half(factors)
        return (dots if LESS == 0 else dots + LESS * sums) * wide - minima * sums
    else:
        return (dots - (zeros.to(tl.float32) - LESS) * sums) * wide


@triton.jit
def load_factors(blocks_ptr, block, HAS_MINIMA: tl.constexpr, mask=None):
    """Load what blocks of groups, any number of them, have as a GroupWeight's blocks: both of a block in an int32."""
    if HAS_MINIMA:
        return tl.load(blocks_ptr.to(tl.pointer_type(tl.int32)) + block, mask=mask)
    else:
        return tl.load(blocks_ptr.to(tl.pointer_type(tl.int16)) + block, mask=mask)


@triton.jit
def lower_half(factors):
    """Return what multiplies the scales of blocks, float32. factors: from load_factors"""
    return factors.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def upper_half(factors):
    """Return what multiplies their minima."""
    return (factors >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def factors_of(scales, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """Return scales as the factors that unpack_tile takes, those of eight bits exactly.

    Powers of two return 2^62 times as large, so that their product with an e2m1's bits, which count 2^-126, is in the
    range of bfloat16: exactly from 2^-68 to groups.LARGEST_POWER. No weight has larger ones: see GroupStore.unpacked.
    """
    if scales.dtype == tl.uint8:
        exponents = scales.to(tl.int32) + RAISED
        if NATIVE:
            tl.static_assert(tl.bfloat16 == DTYPE)
            return exponents * 0x00800080
        else:
            return (exponents << 23).to(tl.float32, bitcast=True).to(DTYPE)
    elif NATIVE:
        return narrow(scales, DTYPE).to(tl.uint16, bitcast=True).to(tl.int32) * 0x00010001
    else:
        return narrow(scales, DTYPE)


@triton.jit
def narrow(scales, DTYPE: tl.constexpr):
    """Return scales as numbers of DTYPE; those of e4m3 exactly, without a conversion on the way if it has 16 bits."""
    if tl.float32 == DTYPE:
        return widen(scales)
    elif scales.dtype.primitive_bitwidth >= 16:
        return scales.to(DTYPE)
    else:
        byte = scales.to(tl.uint8, bitcast=True).to(tl.int16)
        IS_BF16: tl.constexpr = tl.bfloat16 == DTYPE
        bits = (byte & 0x7F) << (4 if IS_BF16 else 7) | (byte & 0x80) << 8  # their exponents have other zeros
        return bits.to(tl.int16).to(DTYPE, bitcast=True) * (2.0**120 if IS_BF16 else 2.0**8)
