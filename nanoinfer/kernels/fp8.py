"""Numbers of eight bits: the e4m3 of Micikevicius et al., 2022."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import cdiv, launch_options, wait_for_predecessor

FP8 = torch.float8_e4m3fn
HAS_FP8 = (8, 9)  # the first GPUs that convert and multiply FP8, and for which Triton has the type
LARGEST = 448.0  # the largest number; those beyond become NaN, if nobody limits them before
BLOCK = tl.constexpr(128)  # a scale serves so many neighbouring numbers of a token, and a multiple in a weight's row
ROOM = 4  # tokens: Fp8Tokens has room for a multiple
SLOW = range(129, 256)  # tokens: cuBLAS multiplies 256 sooner (measured on an H200); other kernels read no more
BLOCKS_PER_PROGRAM = 16
LEAST_SCALE = tl.constexpr(2.0**-120)  # float32 has its reciprocal, too


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return a GPU's compute capability; that of the CPU is 0.0."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


class Fp8Tokens(NamedTuple):
    """The vectors of some tokens: a number times the scale of its block is the vector's.

    numbers: [room, size] FP8, the first `tokens` of which are the tokens'; the others are any
    scales: [size / BLOCK, room] float32; cuBLAS wants this order, and a room that is a multiple of ROOM
    dtype: that of the vectors before they were rounded
    """

    numbers: Tensor
    scales: Tensor
    tokens: int
    dtype: torch.dtype

    @classmethod
    def empty(cls, tokens: int, size: int, like: Tensor) -> Fp8Tokens:
        """Return vectors that a kernel is to fill. like: its dtype and its device are theirs"""
        room = SLOW.stop if tokens in SLOW else cdiv(tokens, ROOM) * ROOM
        scales = torch.empty(size // BLOCK.value, room, dtype=torch.float32, device=like.device)
        return cls(torch.empty(room, size, dtype=FP8, device=like.device), scales, tokens, like.dtype)


class Fp8Weight(NamedTuple):
    """A weight in FP8: a number times the scale of its block is the weight's.

    numbers: [out_features, in_features] FP8; those of several experts have a dimension more before these two
    scales: [out_features / height, in_features / width] float32, for blocks of height x width, or likewise
    """

    numbers: Tensor
    scales: Tensor

    @property
    def block(self) -> tuple[int, int]:
        """The height and the width of the blocks."""
        (*_, rows, columns), (*_, down, across) = self.numbers.shape, self.scales.shape
        return rows // down, columns // across


def parts_of(weight: Tensor | Fp8Weight) -> tuple[Tensor, Tensor | None, tuple[int | None, int | None]]:
    """Return a weight's numbers, their scales, and the blocks' height and width; None: it is not in FP8."""
    return (*weight, weight.block) if isinstance(weight, Fp8Weight) else (weight, None, (None, None))


def as_bytes(x: Tensor) -> Tensor:
    """View an FP8 tensor as uint8, which torch can index everywhere; others stay what they are."""
    return x.view(torch.uint8) if x.dtype == FP8 else x


def quantize(x: Tensor) -> Fp8Tokens:
    """Round vectors, [tokens, size], to FP8: a block's scale makes its largest number the largest that FP8 has.

    size: a multiple of BLOCK
    """
    return quantize_triton(x) if x.is_cuda else quantize_reference(x)


def quantize_reference(x: Tensor) -> Fp8Tokens:
    """quantize in torch."""
    blocks = F.pad(x.float(), (0, 0, 0, -len(x) % ROOM)).unflatten(1, (-1, BLOCK.value))
    scales = (blocks.abs().amax(dim=2) * (1 / LARGEST)).clamp_(min=LEAST_SCALE.value)
    numbers = (blocks * scales.reciprocal().unsqueeze(2)).clamp_(-LARGEST, LARGEST).to(FP8).flatten(1)
    return Fp8Tokens(numbers, scales.T.contiguous(), len(x), x.dtype)


def quantize_triton(x: Tensor) -> Fp8Tokens:
    """quantize as one launch."""
    assert x.is_contiguous()
    out = Fp8Tokens.empty(len(x), x.shape[1], x)
    blocks = x.numel() // BLOCK.value
    across, room = out.scales.shape
    grid = (cdiv(blocks, BLOCKS_PER_PROGRAM),)
    _quantize_kernel[grid](
        x, out.numbers, out.scales, blocks, across, room, BLOCKS=BLOCKS_PER_PROGRAM, **launch_options(x)
    )
    return out


@triton.jit(do_not_specialize=["blocks", "room"])
def _quantize_kernel(x_ptr, out_ptr, scales_ptr, blocks, across, room, BLOCKS: tl.constexpr, EARLY: tl.constexpr):
    wait_for_predecessor(EARLY)
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    places = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    exists = block < blocks
    x = tl.load(x_ptr + places, mask=exists[:, None], other=0.0)
    numbers, scales = quantize_blocks(x.to(tl.float32))
    tl.store(out_ptr + places, numbers.to(out_ptr.dtype.element_ty), mask=exists[:, None])
    tl.store(scales_ptr + block % across * room + block // across, scales, mask=exists)


@triton.jit
def quantize_blocks(x):
    """Quantize inside a kernel: return x, [blocks, BLOCK] float32, as numbers that FP8 has, and the blocks' scales."""
    scales = tl.maximum(tl.max(tl.abs(x), axis=1) * (1 / 448), LEAST_SCALE)
    return round_to_fp8(x * tl.div_rn(1.0, scales)[:, None]), scales


@triton.jit
def round_to_fp8(x):
    """Round x, float32, to numbers that FP8 has, NaN among them: converting them is exact.

    The conversion itself would round too. But Triton's interpreter drops the carry when it rounds up to a power of two.
    """
    x = tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    exponent = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, 121 << 23)  # below 2^-6 the numbers are as dense
    dense = (exponent - (3 << 23)).to(tl.float32, bitcast=True)  # the distance of neighbours
    to_multiple = dense * 12582912.0  # 1.5 * 2^23: a sum with it has no room for less than `dense`
    return (x + to_multiple) - to_multiple
