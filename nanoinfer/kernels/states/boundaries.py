"""Boundaries: the positions at which matrices stand, of all slots, and of a decode step's rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.delta.chunks import CHUNK
from nanoinfer.kernels.launch import cdiv, launch_options, wait_for_predecessor

BLOCK = 256  # rows per program, however few there are, because Triton compiles a kernel for each size


def begin_rows(slots: Tensor, positions: Tensor, boundaries: Tensor, since: int = CHUNK) -> tuple[Tensor, Tensor]:
    """Begin a decode step: move the boundaries on of rows whose matrices take tokens in.

    slots, positions: [rows] int32, of their last tokens; either is -1: an empty row
    boundaries: [slots] int32; since: matrices take tokens in once so many stand before a row's last one
    Returns, both [rows] int32: slots, -1 in each empty row, and the boundaries before.
    """
    return (begin_rows_triton if slots.is_cuda else begin_rows_reference)(slots, positions, boundaries, since)


def begin_rows_reference(
    slots: Tensor, positions: Tensor, boundaries: Tensor, since: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """begin_rows in torch."""
    own = slots.where(positions >= 0, -1)
    before = boundaries[own.clamp(min=0).long()]
    moved = (own >= 0) & (positions - before >= since)
    boundaries[own[moved].long()] += CHUNK
    return own, before


def begin_rows_triton(
    slots: Tensor, positions: Tensor, boundaries: Tensor, since: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """begin_rows as one launch."""
    rows = len(slots)
    own, before = torch.empty_like(slots), torch.empty_like(slots)
    _begin_rows_kernel[(cdiv(rows, BLOCK),)](
        slots, positions, boundaries, own, before, rows, TOKENS=CHUNK, SINCE=since, BLOCK=BLOCK, **launch_options(slots)
    )
    return own, before


@triton.jit(do_not_specialize=["rows"])
def _begin_rows_kernel(
    slots_ptr,
    positions_ptr,
    boundaries_ptr,
    own_ptr,
    before_ptr,
    rows,
    TOKENS: tl.constexpr,
    SINCE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(positions_ptr + row, mask=row < rows, other=-1)
    slot = tl.where(position >= 0, tl.load(slots_ptr + row, mask=row < rows, other=-1), -1)
    boundary = tl.load(boundaries_ptr + slot, mask=slot >= 0, other=0)
    tl.store(boundaries_ptr + slot, boundary + TOKENS, mask=(slot >= 0) & (position - boundary >= SINCE))
    tl.store(own_ptr + row, slot, mask=row < rows)
    tl.store(before_ptr + row, boundary, mask=row < rows)
