"""The matrices of slots, inside kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_matrix(matrices_ptr, slot, matrix, mask, MATRICES: tl.constexpr):
    """Return some numbers of the matrices of a slot, int64, in float32; zeros if it is -1."""
    known = mask & (slot >= 0)
    return tl.load(matrices_ptr + slot * MATRICES + matrix, mask=known, other=0.0).to(tl.float32)


@triton.jit
def store_matrix(matrices_ptr, slot, matrix, mask, state, MATRICES: tl.constexpr):
    """Write some numbers of the matrices of a slot, int64, if it is one."""
    if slot >= 0:
        tl.store(matrices_ptr + slot * MATRICES + matrix, state.to(matrices_ptr.dtype.element_ty), mask=mask)
