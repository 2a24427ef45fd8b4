"""The sums of tokens' vectors, group by group, as tensor cores multiply them by minima of weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import cdiv, launch_options, wait_for_predecessor

SLOTS = tl.constexpr(16)  # groups that a tensor core multiplies at once
NUMBERS_AT_ONCE = 4096  # of a program


@triton.constexpr_function
def planes_of(dtype: tl.dtype) -> int:
    """Return how many numbers of a dtype make a float32: three of bfloat16, which have eight bits each."""
    return 3 if dtype == tl.bfloat16 else 1


def sum_groups(x: Tensor, group: int, block: int) -> Tensor:
    """Return the sums of groups, [tokens, inputs] to [tokens, blocks, planes, SLOTS].

    A block's groups have the slots that they have among SLOTS neighbours; the others are 0. The planes add up to the
    sums: three in bfloat16, or one in float32, if x has that.
    """
    assert x.is_contiguous()
    blocks, is_wide = x.shape[1] // block, x.dtype == torch.float32
    shape, dtype = (len(x), blocks, 1 if is_wide else 3, SLOTS.value), torch.float32 if is_wide else torch.bfloat16
    out = torch.empty(shape, dtype=dtype, device=x.device)
    at_once = max(NUMBERS_AT_ONCE // (SLOTS.value * group), 1)
    _sum_kernel[(cdiv(len(x) * blocks, at_once),)](
        x, out, len(x) * blocks, blocks, GROUP=group, BLOCK=block, BLOCKS=at_once, **launch_options(x)
    )
    return out


@triton.jit(do_not_specialize=["count"])
def _sum_kernel(
    x_ptr,
    out_ptr,
    count,
    blocks,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    EARLY: tl.constexpr,
):
    PER_BLOCK: tl.constexpr = BLOCK // GROUP
    PLANES: tl.constexpr = planes_of(out_ptr.dtype.element_ty)
    wait_for_predecessor(EARLY)
    number = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)  # of all tokens' blocks
    slot, place = tl.arange(0, SLOTS), tl.arange(0, GROUP)
    own = (number % blocks)[:, None] % (SLOTS // PER_BLOCK) == slot[None, :] // PER_BLOCK
    exists = (number < count)[:, None]
    starts = number.to(tl.int64)[:, None] * BLOCK + (slot % PER_BLOCK)[None, :] * GROUP
    x = tl.load(x_ptr + starts[:, :, None] + place, mask=(own & exists)[:, :, None], other=0.0)
    rest = tl.sum(x.to(tl.float32), axis=2)
    for plane in tl.static_range(PLANES):
        rounded = rest.to(out_ptr.dtype.element_ty)
        places = (number.to(tl.int64)[:, None] * PLANES + plane) * SLOTS + slot[None, :]
        tl.store(out_ptr + places, rounded, mask=exists)
        rest -= rounded.to(tl.float32)
