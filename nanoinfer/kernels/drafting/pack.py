"""The places of a verifying step: the rows' last tokens, and behind them the guesses of all rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import early_launch, wait_for_predecessor


class Places(NamedTuple):
    """The tokens of a verifying step. Place r holds row r's last token; its guesses stand together behind all rows.

    tokens: [places] int32
    positions: [places] int32; -1: an empty place, as those of empty rows and of rows that have their last token
    row_of: [places] int32, whose token it is; 0 in a place that has no guess
    first: [rows] int32, the place of a row's first guess, counted from behind the rows
    counts: [rows] int32, the row's guesses
    """

    tokens: Tensor
    positions: Tensor
    row_of: Tensor
    first: Tensor
    counts: Tensor


def pack_guesses(
    guesses: Tensor,
    counts: Tensor,
    last_tokens: Tensor,
    positions: Tensor,
    ends: Tensor,
    limits: Tensor,
    may_guess: Tensor,
    num_places: int,
) -> Places:
    """Pack the guesses of all rows into so many places, in the order of the rows; what comes behind these is cut.

    A row has as many guesses as it has proposed, at most its limit, and never one at its last position or behind it.

    guesses: [rows, most] int32; counts: [rows] int32, how many of these a row has proposed
    last_tokens, positions: [rows] int32, of the last known token; -1: an empty row
    ends, limits, may_guess: [rows] int32: a text has at most so many tokens; a step verifies at most so many guesses of
        a row; 0: it has none
    """
    function = pack_guesses_triton if guesses.is_cuda else pack_guesses_reference
    return function(guesses, counts, last_tokens, positions, ends, limits, may_guess, num_places)


def pack_guesses_reference(
    guesses: Tensor,
    counts: Tensor,
    last_tokens: Tensor,
    positions: Tensor,
    ends: Tensor,
    limits: Tensor,
    may_guess: Tensor,
    num_places: int,
) -> Places:
    """pack_guesses in torch."""
    rows, most = guesses.shape
    goes_on = (positions >= 0) & (positions + 1 < ends)
    wanted = torch.minimum(torch.minimum(counts, limits), ends - positions - 2).clamp(min=0)
    wanted = wanted.where(goes_on & (may_guess > 0), 0)
    first = (wanted.cumsum(0) - wanted).clamp(max=num_places).int()
    taken = torch.minimum(wanted, num_places - first)
    tokens = torch.cat([last_tokens, last_tokens.new_zeros(num_places)])
    placed = torch.cat([positions.where(goes_on, -1), positions.new_full((num_places,), -1)])
    row_of = torch.cat([torch.arange(rows, dtype=torch.int32), positions.new_zeros(num_places)])
    row, guess = (torch.arange(most) < taken[:, None]).nonzero(as_tuple=True)
    behind = slice(rows, rows + len(row))  # packed as they are found: row after row
    tokens[behind], row_of[behind] = guesses[row, guess], row.int()
    placed[behind] = positions[row] + 1 + guess.int()
    return Places(tokens, placed, row_of, first, taken)


def pack_guesses_triton(
    guesses: Tensor,
    counts: Tensor,
    last_tokens: Tensor,
    positions: Tensor,
    ends: Tensor,
    limits: Tensor,
    may_guess: Tensor,
    num_places: int,
) -> Places:
    """pack_guesses as one launch, of one program."""
    rows, most = guesses.shape
    places = [torch.empty(rows + num_places, dtype=torch.int32, device=guesses.device) for _ in range(3)]
    of_rows = [torch.empty(rows, dtype=torch.int32, device=guesses.device) for _ in range(2)]
    _pack_kernel[(1,)](
        guesses,
        counts,
        last_tokens,
        positions,
        ends,
        limits,
        may_guess,
        *places,
        *of_rows,
        ROWS=rows,
        BLOCK_ROWS=triton.next_power_of_2(rows),
        MOST=most,
        BLOCK_MOST=triton.next_power_of_2(most),
        PLACES=num_places,
        BLOCK_PLACES=triton.next_power_of_2(num_places),
        **early_launch(guesses),
    )
    return Places(*places, *of_rows)


@triton.jit
def _pack_kernel(
    guesses_ptr,
    counts_ptr,
    last_tokens_ptr,
    positions_ptr,
    ends_ptr,
    limits_ptr,
    may_guess_ptr,
    tokens_ptr,
    placed_ptr,
    row_of_ptr,
    first_ptr,
    taken_ptr,
    ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK_MOST: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK_PLACES: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY)
    row = tl.arange(0, BLOCK_ROWS)
    mask = row < ROWS
    position = tl.load(positions_ptr + row, mask=mask, other=-1)
    end = tl.load(ends_ptr + row, mask=mask, other=0)
    goes_on = (position >= 0) & (position + 1 < end)
    wanted = tl.minimum(tl.load(counts_ptr + row, mask=mask, other=0), tl.load(limits_ptr + row, mask=mask, other=0))
    wanted = tl.maximum(tl.minimum(wanted, end - position - 2), 0)
    may_guess = tl.load(may_guess_ptr + row, mask=mask, other=0) > 0
    wanted = tl.where(goes_on & may_guess, wanted, 0)
    first = tl.minimum(tl.cumsum(wanted, 0) - wanted, PLACES)
    taken = tl.minimum(wanted, PLACES - first)
    tl.store(first_ptr + row, first, mask=mask)
    tl.store(taken_ptr + row, taken, mask=mask)
    tl.store(tokens_ptr + row, tl.load(last_tokens_ptr + row, mask=mask), mask=mask)
    tl.store(placed_ptr + row, tl.where(goes_on, position, -1), mask=mask)
    tl.store(row_of_ptr + row, row, mask=mask)
    guess = tl.arange(0, BLOCK_MOST)
    is_taken = guess[None, :] < taken[:, None]
    place = ROWS + first[:, None] + guess[None, :]
    token = tl.load(guesses_ptr + row[:, None] * MOST + guess[None, :], mask=is_taken, other=0)
    tl.store(tokens_ptr + place, token, mask=is_taken)
    tl.store(placed_ptr + place, position[:, None] + 1 + guess[None, :], mask=is_taken)
    tl.store(row_of_ptr + place, row[:, None] + tl.zeros_like(place), mask=is_taken)
    empty = tl.arange(0, BLOCK_PLACES)
    is_empty = (empty >= tl.sum(taken)) & (empty < PLACES)
    nothing = tl.zeros([BLOCK_PLACES], tl.int32)
    tl.store(tokens_ptr + ROWS + empty, nothing, mask=is_empty)
    tl.store(placed_ptr + ROWS + empty, nothing - 1, mask=is_empty)
    tl.store(row_of_ptr + ROWS + empty, nothing, mask=is_empty)
