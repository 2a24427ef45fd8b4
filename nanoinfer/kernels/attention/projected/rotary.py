"""The rotation of queries and keys by their positions (Su et al., 2021), and what may stand in the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.fp8 import round_to_fp8


def rotated(x: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate x, [tokens, heads, head_dim], by cos_sin, [tokens, rotary_dim]; returns float32."""
    rotary_dim = cos_sin.shape[-1]
    turning, rest = x.float().split([rotary_dim, x.shape[-1] - rotary_dim], dim=-1)
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    if interleaved:
        first, second = turning[..., ::2], turning[..., 1::2]
    else:
        first, second = turning.chunk(2, dim=-1)
    turned = (first * cos).addcmul_(second, sin, value=-1), (second * cos).addcmul_(first, sin)
    if interleaved:
        return torch.cat([torch.stack(turned, dim=-1).flatten(-2), rest], dim=-1)
    return torch.cat([*turned, rest], dim=-1)


@triton.jit
def load_pairs(ptr, apart, mask):
    """Load the numbers at ptr, and those that they are rotated with."""
    return tl.load(ptr, mask=mask, other=0.0), tl.load(ptr + apart, mask=mask, other=0.0)


@triton.jit
def store_pairs(ptr, first, second, apart, mask):
    """Store numbers at ptr, and those that they were rotated with."""
    tl.store(ptr, first, mask=mask)
    tl.store(ptr + apart, second, mask=mask)


@triton.jit
def finite(x):
    """Replace infinite numbers and NaN by 0."""
    return tl.where(x * 0.0 == 0.0, x, 0.0).to(x.dtype)


@triton.jit
def in_fp8(x, scale):
    """Return x / scale as numbers that FP8 has."""
    return round_to_fp8(tl.div_rn(x.to(tl.float32), scale))
