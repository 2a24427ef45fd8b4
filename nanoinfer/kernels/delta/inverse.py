"""The inverse of a triangular matrix with ones on its diagonal.

Inverses of blocks on the diagonal are put together, two neighbours at a time. If L and R are their inverses, and B is
what lies below the one block and left of the other, then -R B L lies there in the inverse of all three.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def invert_reference(below: Tensor) -> Tensor:
    """Return the inverse of 1 + below, [..., size, size], a power of two; below: 0 on the diagonal and above.

    torch.linalg.solve_triangular lets threads share each small matrix, one after another, and they wait for each other.
    """
    size = below.shape[-1]
    row = torch.arange(size, device=below.device)
    inverse = torch.eye(size, dtype=below.dtype, device=below.device).expand_as(below)
    for level in range((size - 1).bit_length()):
        block = row >> level
        between = below.where((block.unsqueeze(1) == block + 1) & (block.unsqueeze(1) % 2 == 1), 0)
        inverse = inverse - inverse @ between @ inverse
    return inverse


@triton.jit
def invert(below, SIZE: tl.constexpr, FACTORS: tl.constexpr):
    """invert_reference inside a kernel, for 64 float32 rows: each of four warps has 16 of them at first.

    FACTORS: the dtype of what is multiplied. The rule enlarges nothing that it has learned: no number in the inverse of
    its system is above 1, or above the largest strength. So float16 serves models of 16 bits, and rounds less than
    bfloat16.
    """
    tl.static_assert(SIZE == 64)
    block = tl.arange(0, 4)
    is_diagonal = (block[:, None] == block)[:, None, :, None]
    r = tl.arange(0, 16)
    row, column = r[None, :, None], r[None, None, :]
    small = tl.sum(tl.where(is_diagonal, tl.reshape(below, [4, 16, 4, 16]), 0.0), axis=2)
    inverse = tl.where(row == column, 1.0, 0.0) - _between(small, row, column, 1)
    for level in tl.static_range(1, 4):
        inverse = _join(inverse, small, row, column, 1 << level, FACTORS, "ieee")
    inverse = tl.reshape(tl.where(is_diagonal, inverse[:, :, None, :], 0.0), [64, 64])
    r = tl.arange(0, 64)
    for level in tl.static_range(4, 6):
        inverse = _join(inverse, below, r[:, None], r[None, :], 1 << level, FACTORS, "ieee")
    return inverse


@triton.jit
def invert_few(below):
    """invert_reference inside a kernel, for 16 float32 rows. Three products of tf32 are as exact as one of float32."""
    r = tl.arange(0, 16)
    row, column = r[:, None], r[None, :]
    inverse = tl.where(row == column, 1.0, 0.0) - _between(below, row, column, 1)
    for level in tl.static_range(1, 4):
        inverse = _join(inverse, below, row, column, 1 << level, tl.float32, "tf32x3")
    return inverse


@triton.jit
def _join(inverse, below, row, column, HALF: tl.constexpr, FACTORS: tl.constexpr, PRECISION: tl.constexpr):
    """Make inverses of blocks of 2 * HALF rows of those of HALF rows."""
    between = _between(below, row, column, HALF).to(FACTORS)
    product = tl.dot(inverse.to(FACTORS), between, input_precision=PRECISION)
    return inverse - tl.dot(product.to(FACTORS), inverse.to(FACTORS), input_precision=PRECISION)


@triton.jit
def _between(below, row, column, HALF: tl.constexpr):
    """Keep what lies below every other block of HALF rows, left of the next one."""
    return tl.where((row // HALF == column // HALF + 1) & (row // HALF % 2 == 1), below, 0.0)
