"""The rows of the running batch, advanced on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import cdiv, launch_options, wait_for_predecessor

BLOCK = 256  # rows per program, however few there are, because Triton compiles a kernel for each size


def locate_rows(
    positions: Tensor, block_tables: Tensor, block_size: int, deltas: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the KV cache slot of each row's next token, the context that this token sees, and where it is rotated to.

    positions: [rows] int32, -1 in an empty row; block_tables: [rows, max blocks] int32
    deltas: [rows] int32, a token's rotary position less its place; None: they are equal
    Returns, each [rows] int32: slots (block * block_size + offset, -1 for an empty row), context lengths, and rotary
    positions, which are below 0 in an empty row.
    """
    function = locate_rows_triton if positions.is_cuda else locate_rows_reference
    return function(positions, block_tables, block_size, deltas)


def locate_rows_reference(
    positions: Tensor, block_tables: Tensor, block_size: int, deltas: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """locate_rows in torch."""
    at = positions.clamp(min=0)
    block = block_tables.gather(1, (at // block_size).long().unsqueeze(1)).squeeze(1)
    slots = (block * block_size + at % block_size).where(positions >= 0, -1)
    return slots, positions + 1, positions if deltas is None else (positions + deltas).where(positions >= 0, -1)


def locate_rows_triton(
    positions: Tensor, block_tables: Tensor, block_size: int, deltas: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """locate_rows as one launch."""
    slots, context_lens = torch.empty_like(positions), torch.empty_like(positions)
    rotary = positions if deltas is None else torch.empty_like(positions)
    rows = len(positions)
    _locate_rows_kernel[(cdiv(rows, BLOCK),)](
        positions,
        block_tables,
        deltas,
        slots,
        context_lens,
        rotary,
        rows,
        block_tables.stride(0),
        BLOCK_SIZE=block_size,
        BLOCK=BLOCK,
        **launch_options(positions),
    )
    return slots, context_lens, rotary


@triton.jit(do_not_specialize=["rows"])
def _locate_rows_kernel(
    positions_ptr,
    block_tables_ptr,
    deltas_ptr,
    slots_ptr,
    context_lens_ptr,
    rotary_ptr,
    rows,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(positions_ptr + row, mask=row < rows, other=-1)
    filled = position >= 0
    block = tl.load(block_tables_ptr + row * table_stride + position // BLOCK_SIZE, mask=filled, other=0)
    slot = tl.where(filled, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(slots_ptr + row, slot, mask=row < rows)
    tl.store(context_lens_ptr + row, position + 1, mask=row < rows)
    if deltas_ptr is not None:
        delta = tl.load(deltas_ptr + row, mask=filled, other=0)
        tl.store(rotary_ptr + row, position + delta, mask=row < rows)


def advance_rows(last_tokens: Tensor, positions: Tensor, token_ids: Tensor, drawn: Tensor | None = None) -> None:
    """Give each row its sampled token and move it one position on; empty rows stay empty. All [rows] int32.

    A row whose token is negative (see kernels.sampling.draw) goes on with token 0. drawn: gets the tokens as they are
    """
    function = advance_rows_triton if positions.is_cuda else advance_rows_reference
    function(last_tokens, positions, token_ids, drawn)


def advance_rows_reference(
    last_tokens: Tensor, positions: Tensor, token_ids: Tensor, drawn: Tensor | None = None
) -> None:
    """advance_rows in torch."""
    torch.clamp(token_ids, min=0, out=last_tokens)
    positions += positions >= 0
    if drawn is not None:
        drawn.copy_(token_ids)


def advance_rows_triton(last_tokens: Tensor, positions: Tensor, token_ids: Tensor, drawn: Tensor | None = None) -> None:
    """advance_rows as one launch."""
    rows = len(positions)
    _advance_rows_kernel[(cdiv(rows, BLOCK),)](
        last_tokens, positions, token_ids, drawn, rows, BLOCK=BLOCK, **launch_options(positions)
    )


# Rows that join begin anywhere: alignment would compile anew.
@triton.jit(
    do_not_specialize=["rows"], do_not_specialize_on_alignment=["last_tokens_ptr", "positions_ptr", "drawn_ptr"]
)
def _advance_rows_kernel(
    last_tokens_ptr, positions_ptr, token_ids_ptr, drawn_ptr, rows, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    wait_for_predecessor(EARLY)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < rows
    token_id = tl.load(token_ids_ptr + row, mask=mask)
    tl.store(last_tokens_ptr + row, tl.maximum(token_id, 0), mask=mask)
    if drawn_ptr is not None:
        tl.store(drawn_ptr + row, token_id, mask=mask)
    position = tl.load(positions_ptr + row, mask=mask)
    tl.store(positions_ptr + row, tl.where(position >= 0, position + 1, position), mask=mask)
