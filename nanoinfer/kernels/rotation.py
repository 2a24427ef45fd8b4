"""The rotation of a vision tower's queries and keys by their positions (Su et al., 2021), in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import next_power_of_2


def rotate_heads(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate each head, whose number i stands with number i + head_dim / 2, in float32.

    heads: [tokens, heads, head_dim]; its tokens may lie apart
    cos, sin: [tokens, head_dim], those of a token's angles
    """
    (rotate_heads_triton if heads.is_cuda else rotate_heads_reference)(heads, cos, sin)


def rotate_heads_reference(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """rotate_heads in torch."""
    first, second = heads.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    heads.copy_(heads.float() * cos.float()[:, None] + turned * sin.float()[:, None])


def rotate_heads_triton(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """rotate_heads as one launch."""
    tokens, num_heads, head_dim = heads.shape
    assert heads[0].is_contiguous()
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    _rotate_heads_kernel[(tokens,)](
        heads,
        cos,
        sin,
        heads.stride(0),
        HEADS=num_heads,
        DIM=head_dim,
        BLOCK_HEADS=next_power_of_2(num_heads),
        BLOCK_HALF=next_power_of_2(head_dim // 2),
        enable_fp_fusion=True,
    )


@triton.jit
def _rotate_heads_kernel(
    heads_ptr,
    cos_ptr,
    sin_ptr,
    token_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    first = tl.arange(0, BLOCK_HALF)[None, :]
    second = first + DIM // 2
    in_half = first < DIM // 2
    mask = (head < HEADS) & in_half
    own_ptr = heads_ptr + token * token_stride + head * DIM
    x = tl.load(own_ptr + first, mask=mask).to(tl.float32)
    y = tl.load(own_ptr + second, mask=mask).to(tl.float32)
    cos_ptr += token * DIM
    sin_ptr += token * DIM
    cos_x, cos_y = tl.load(cos_ptr + first, mask=in_half), tl.load(cos_ptr + second, mask=in_half)
    sin_x, sin_y = tl.load(sin_ptr + first, mask=in_half), tl.load(sin_ptr + second, mask=in_half)
    dtype = heads_ptr.dtype.element_ty
    tl.store(own_ptr + first, (x * cos_x - y * sin_x).to(dtype), mask=mask)
    tl.store(own_ptr + second, (y * cos_y + x * sin_y).to(dtype), mask=mask)
