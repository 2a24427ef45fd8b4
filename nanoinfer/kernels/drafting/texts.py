"""The texts of rows, kept up to date on the device."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import cdiv, launch_options, wait_for_predecessor

BLOCK = 256  # rows per program


def write_last_tokens(tokens: Tensor, lengths: Tensor, slots: Tensor, positions: Tensor, last_tokens: Tensor) -> None:
    """Write each row's last token behind the others of its text, before a step computes it.

    tokens: [slots, width] int32, a text in each slot; lengths: [slots] int32
    slots, positions, last_tokens: [rows] int32; a row's text ends with the token at its position; -1: an empty row.
        Only a trial has a position behind the width, or one without a slot; nothing is written for these
    """
    function = write_last_tokens_triton if tokens.is_cuda else write_last_tokens_reference
    function(tokens, lengths, slots, positions, last_tokens)


def write_last_tokens_reference(
    tokens: Tensor, lengths: Tensor, slots: Tensor, positions: Tensor, last_tokens: Tensor
) -> None:
    """write_last_tokens in torch."""
    filled = (slots >= 0) & (positions >= 0) & (positions < tokens.shape[1])
    own, at = slots[filled], positions[filled]
    tokens[own, at] = last_tokens[filled]
    lengths[own] = at + 1


def write_last_tokens_triton(
    tokens: Tensor, lengths: Tensor, slots: Tensor, positions: Tensor, last_tokens: Tensor
) -> None:
    """write_last_tokens as one launch."""
    rows = len(positions)
    _write_kernel[(cdiv(rows, BLOCK),)](
        tokens,
        lengths,
        slots,
        positions,
        last_tokens,
        rows,
        tokens.stride(0),
        BLOCK=BLOCK,
        **launch_options(tokens),
    )


@triton.jit(do_not_specialize=["rows"])
def _write_kernel(
    tokens_ptr,
    lengths_ptr,
    slots_ptr,
    positions_ptr,
    last_tokens_ptr,
    rows,
    width,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(positions_ptr + row, mask=row < rows, other=-1)
    slot = tl.load(slots_ptr + row, mask=row < rows, other=-1).to(tl.int64)
    filled = (slot >= 0) & (position >= 0) & (position < width)
    last = tl.load(last_tokens_ptr + row, mask=filled, other=0)
    tl.store(tokens_ptr + slot * width + position, last, mask=filled)
    tl.store(lengths_ptr + slot, position + 1, mask=filled)
