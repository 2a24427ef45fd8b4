"""The tokens that a draft model computes to guess: the last two of each row, and then what it has drawn itself."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import cdiv, launch_options, wait_for_predecessor

BLOCK = 256  # rows per program


class DraftedRows(NamedTuple):
    """The rows for which a draft model guesses. All are [rows] int32.

    last_tokens, positions: of the last known token; -1: an empty row
    ends: a text has at most so many tokens
    """

    last_tokens: Tensor
    positions: Tensor
    ends: Tensor


def last_two_tokens(rows: DraftedRows, texts: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the token before the last of each row, and behind those of all rows the last ones.

    texts: [slots, width] int32, a text in each slot; slots: [rows] int32, a row's
    Returns, each [2 * rows] int32: tokens, their positions, and whose they are. A position is -1 if no guess is wanted:
    the row may have none, or would have it at its last position or behind it.
    """
    return (last_two_tokens_triton if slots.is_cuda else last_two_tokens_reference)(rows, texts, slots)


def last_two_tokens_reference(rows: DraftedRows, texts: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """last_two_tokens in torch."""
    placed = _placed(rows, 0)
    before = (placed - 1).where(placed >= 0, -1)
    tokens = texts[slots.clamp(min=0), before.clamp(min=0)].where(before >= 0, 0)
    row_of = torch.arange(len(slots), dtype=torch.int32)
    last = rows.last_tokens.where(placed >= 0, 0)
    return torch.cat([tokens, last]), torch.cat([before, placed]), row_of.repeat(2)


def last_two_tokens_triton(rows: DraftedRows, texts: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """last_two_tokens as one launch."""
    count = len(slots)
    tokens, positions, row_of = (torch.empty(2 * count, dtype=torch.int32, device=slots.device) for _ in range(3))
    _last_two_kernel[(cdiv(count, BLOCK),)](
        *rows, texts, slots, tokens, positions, row_of, count, texts.stride(0), BLOCK=BLOCK, **launch_options(slots)
    )
    return tokens, positions, row_of


def next_tokens(rows: DraftedRows, drawn: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return the token that a draft model has drawn for each row, and where it stands.

    drawn: [rows] int32, a row's guess of this number, from 1; one that is negative becomes token 0
    Returns tokens and positions, each [rows] int32. A position is -1 as for last_two_tokens.
    """
    return (next_tokens_triton if drawn.is_cuda else next_tokens_reference)(rows, drawn, number)


def next_tokens_reference(rows: DraftedRows, drawn: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """next_tokens in torch."""
    return drawn.clamp(min=0), _placed(rows, number)


def next_tokens_triton(rows: DraftedRows, drawn: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """next_tokens as one launch."""
    tokens, positions, count = torch.empty_like(drawn), torch.empty_like(drawn), len(drawn)
    _next_kernel[(cdiv(count, BLOCK),)](
        *rows[1:], drawn, tokens, positions, count, number, BLOCK=BLOCK, **launch_options(drawn)
    )
    return tokens, positions


def _placed(rows: DraftedRows, number: int) -> Tensor:
    """Return where the token so far behind the last one stands, if there is to be a guess behind it."""
    at = rows.positions + number
    return at.where((rows.positions >= 0) & (at + 3 <= rows.ends), -1)


@triton.jit
def _place(positions_ptr, ends_ptr, row, mask, number):
    """_placed for a program's rows."""
    position = tl.load(positions_ptr + row, mask=mask, other=-1)
    wanted = (position >= 0) & (position + number + 3 <= tl.load(ends_ptr + row, mask=mask, other=0))
    return tl.where(wanted, position + number, -1)


@triton.jit(do_not_specialize=["rows"])
def _last_two_kernel(
    last_tokens_ptr,
    positions_ptr,
    ends_ptr,
    texts_ptr,
    slots_ptr,
    tokens_ptr,
    placed_ptr,
    row_of_ptr,
    rows,
    width,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < rows
    placed = _place(positions_ptr, ends_ptr, row, mask, 0)
    wanted = placed >= 0
    slot = tl.load(slots_ptr + row, mask=wanted, other=0).to(tl.int64)
    before = tl.load(texts_ptr + slot * width + placed - 1, mask=wanted & (placed > 0), other=0)
    tl.store(tokens_ptr + row, before, mask=mask)
    tl.store(tokens_ptr + rows + row, tl.load(last_tokens_ptr + row, mask=wanted, other=0), mask=mask)
    tl.store(placed_ptr + row, tl.where(wanted, placed - 1, -1), mask=mask)
    tl.store(placed_ptr + rows + row, placed, mask=mask)
    tl.store(row_of_ptr + row, row, mask=mask)
    tl.store(row_of_ptr + rows + row, row, mask=mask)


@triton.jit(do_not_specialize=["rows", "number"])
def _next_kernel(
    positions_ptr,
    ends_ptr,
    drawn_ptr,
    tokens_ptr,
    placed_ptr,
    rows,
    number,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < rows
    drawn = tl.load(drawn_ptr + row, mask=mask, other=0)
    tl.store(tokens_ptr + row, tl.maximum(drawn, 0), mask=mask)
    tl.store(placed_ptr + row, _place(positions_ptr, ends_ptr, row, mask, number), mask=mask)
