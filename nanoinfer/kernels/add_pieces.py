"""The sum of the pieces of a product, or of a token's weighted results of its experts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import cdiv, launch_options, wait_for_predecessor

BLOCK = 1024  # of the numbers of a token that a program adds up


def add_pieces(
    pieces: Tensor, experts: Tensor | None = None, num_experts: int = 0, dtype: torch.dtype | None = None
) -> Tensor:
    """Add up pieces, [pieces, tokens, size] to [tokens, size], in float32 and in their order.

    dtype: of the sums; None: that of the pieces
    experts: [tokens, pieces] int32, whose each piece is; those from num_experts on are left out; None: all are added
    """
    count, tokens, size = pieces.shape
    out = pieces.new_empty(tokens, size, dtype=dtype)
    grid = (tokens, cdiv(size, BLOCK))
    numbers = tokens * size, size, num_experts
    _add_pieces_kernel[grid](pieces, experts, out, *numbers, PIECES=count, BLOCK=BLOCK, **launch_options(pieces))
    return out


@triton.jit
def _add_pieces_kernel(
    pieces_ptr,
    experts_ptr,
    out_ptr,
    stride,
    size,
    num_experts,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.program_id(0).to(tl.int64) * size + i
    total = tl.zeros([BLOCK], tl.float32)
    for piece in tl.static_range(PIECES):
        from_piece = pieces_ptr + piece * stride.to(tl.int64) + place
        exists = i < size
        if experts_ptr is not None:
            exists &= tl.load(experts_ptr + tl.program_id(0) * PIECES + piece) < num_experts
        total += tl.load(from_piece, mask=exists, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, total, mask=i < size)
