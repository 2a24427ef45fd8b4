"""The places of a verifying step: the rows' last tokens, and behind them the guesses of all rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import launch_options, next_power_of_2, wait_for_predecessor

BLOCK_ROWS, BLOCK_PLACES = 128, 256  # whatever a step has, if it has no more: the kernel compiles once


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

    @staticmethod
    def room(num_rows: int, num_tokens: int, device: torch.device) -> Places:
        """Return Places without a token, for so many rows and for so many tokens."""
        tokens, positions, row_of = (torch.zeros(num_tokens, dtype=torch.int32, device=device) for _ in range(3))
        of_rows = [torch.zeros(num_rows, dtype=torch.int32, device=device) for _ in range(2)]
        return Places(tokens, positions.fill_(-1), row_of, *of_rows)

    def of_size(self, num_rows: int, num_guesses: int) -> Places:
        """Return the first of these places, as those of a step of this size."""
        of_tokens = (column[: num_rows + num_guesses] for column in self[:3])
        return Places(*of_tokens, *(column[:num_rows] for column in self[3:]))


class GuessedRows(NamedTuple):
    """Which rows of a batch a verifying step has, whose last tokens come first in it, and which guesses are whose.

    rows: those of the batch, a slice or [rows] int64
    first, counts: [rows] int32, see Places; most: a row has so many guesses at most
    """

    rows: slice | Tensor
    first: Tensor
    counts: Tensor
    most: int


class GuessingRows(NamedTuple):
    """What has been proposed for rows, and what limits it. All are int32.

    guesses: [rows, most]; counts: [rows], how many of these a row has
    last_tokens, positions: [rows], of the last known token; -1: an empty row
    ends: [rows], a text has at most so many tokens
    limits: [rows], a step verifies at most so many guesses of a row
    """

    guesses: Tensor
    counts: Tensor
    last_tokens: Tensor
    positions: Tensor
    ends: Tensor
    limits: Tensor


def blocks_of(num_rows: int, num_guesses: int) -> dict[str, int]:
    """Return the blocks of a program that takes all rows, and all guesses, of a step."""
    return {
        "BLOCK_ROWS": max(BLOCK_ROWS, next_power_of_2(num_rows)),
        "BLOCK_PLACES": max(BLOCK_PLACES, next_power_of_2(num_guesses)),
    }


def pack_guesses(rows: GuessingRows, places: Places, vocab_size: int, are_free: bool) -> None:
    """Pack the guesses of all rows into places, in the order of the rows.

    A row has as many guesses as it has proposed, at most its limit, and never one at its last position or behind it.
    A number that is no token id ends its guesses. Where empty places take as long as others, limits count only if there
    are fewer places than guesses. If the places do not suffice, all rows have their first guesses before any has later
    ones, because a later guess holds only behind all that come before it.

    places: of the step's size
    are_free: empty places take as long as others
    """
    (pack_guesses_triton if rows.guesses.is_cuda else pack_guesses_reference)(rows, places, vocab_size, are_free)


def pack_guesses_reference(rows: GuessingRows, places: Places, vocab_size: int, are_free: bool) -> None:
    """pack_guesses in torch."""
    guesses, counts, last_tokens, positions, ends, limits = rows
    num_rows, most = guesses.shape
    num_places = len(places.tokens) - num_rows
    goes_on = (positions >= 0) & (positions + 1 < ends)
    wanted = torch.minimum(counts, ends - positions - 2).clamp(min=0)
    are_tokens = ((guesses >= 0) & (guesses < vocab_size)).int().cumprod(dim=1).sum(dim=1)
    wanted = torch.minimum(wanted, are_tokens).where(goes_on, 0)
    if not are_free or wanted.sum() > num_places:
        wanted = torch.minimum(wanted, limits).clamp(min=0)  # an empty row's limit is negative
    level = (wanted.clamp(max=1 + torch.arange(most)[:, None]).sum(dim=1) <= num_places).sum()  # that all may have
    taken, has_more = torch.minimum(wanted, level), wanted > level
    taken += has_more & (has_more.cumsum(0) <= num_places - taken.sum())
    for column, empty in zip(places[:3], (0, -1, 0), strict=True):
        column[num_rows:] = empty
    places.tokens[:num_rows], places.row_of[:num_rows] = last_tokens, torch.arange(num_rows)
    places.positions[:num_rows] = positions.where(goes_on, -1)
    row, guess = (torch.arange(most) < taken[:, None]).nonzero(as_tuple=True)
    behind = slice(num_rows, num_rows + len(row))  # packed as they are found: row after row
    places.tokens[behind], places.row_of[behind] = guesses[row, guess], row.int()
    places.positions[behind] = positions[row] + 1 + guess.int()
    places.first.copy_(taken.cumsum(0) - taken)
    places.counts.copy_(taken)


def pack_guesses_triton(rows: GuessingRows, places: Places, vocab_size: int, are_free: bool) -> None:
    """pack_guesses as one launch, of one program."""
    num_rows, most = rows.guesses.shape
    num_places = len(places.tokens) - num_rows
    _pack_kernel[(1,)](
        *rows,
        *places,
        num_rows,
        num_places,
        vocab_size,
        MOST=most,
        BLOCK_MOST=next_power_of_2(most),
        **blocks_of(num_rows, num_places),
        ARE_FREE=are_free,
        **launch_options(rows.guesses),
    )


@triton.jit(do_not_specialize=["rows", "places", "vocab_size"])
def _pack_kernel(
    guesses_ptr,
    counts_ptr,
    last_tokens_ptr,
    positions_ptr,
    ends_ptr,
    limits_ptr,
    tokens_ptr,
    placed_ptr,
    row_of_ptr,
    first_ptr,
    taken_ptr,
    rows,
    places,
    vocab_size,
    MOST: tl.constexpr,
    BLOCK_MOST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_PLACES: tl.constexpr,
    ARE_FREE: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY)
    row = tl.arange(0, BLOCK_ROWS)
    mask = row < rows
    position = tl.load(positions_ptr + row, mask=mask, other=-1)
    end = tl.load(ends_ptr + row, mask=mask, other=0)
    goes_on = (position >= 0) & (position + 1 < end)
    wanted = tl.load(counts_ptr + row, mask=mask, other=0)
    wanted = tl.maximum(tl.minimum(wanted, end - position - 2), 0)
    guess = tl.arange(0, BLOCK_MOST)
    is_there = mask[:, None] & (guess < MOST)[None, :]
    token = tl.load(guesses_ptr + row[:, None] * MOST + guess[None, :], mask=is_there, other=-1)
    is_token = (token >= 0) & (token < vocab_size)
    wanted = tl.minimum(wanted, tl.min(tl.where(is_token, BLOCK_MOST, guess[None, :]), 1))
    wanted = tl.where(goes_on, wanted, 0)
    limit = tl.load(limits_ptr + row, mask=mask, other=0)
    if ARE_FREE:
        limit = tl.where(tl.sum(wanted) > places, limit, MOST)
    wanted = tl.maximum(tl.minimum(wanted, limit), 0)  # an empty row's limit is negative
    level = 0  # that all may have
    for most in tl.static_range(1, MOST + 1):
        level += (tl.sum(tl.minimum(wanted, most)) <= places).to(tl.int32)
    taken = tl.minimum(wanted, level)
    has_more = (wanted > level).to(tl.int32)
    taken += (has_more > 0) & (tl.cumsum(has_more, 0) <= places - tl.sum(taken))
    first = tl.cumsum(taken, 0) - taken
    tl.store(first_ptr + row, first, mask=mask)
    tl.store(taken_ptr + row, taken, mask=mask)
    tl.store(tokens_ptr + row, tl.load(last_tokens_ptr + row, mask=mask), mask=mask)
    tl.store(placed_ptr + row, tl.where(goes_on, position, -1), mask=mask)
    tl.store(row_of_ptr + row, row, mask=mask)
    is_taken = guess[None, :] < taken[:, None]
    place = rows + first[:, None] + guess[None, :]
    tl.store(tokens_ptr + place, token, mask=is_taken)
    tl.store(placed_ptr + place, position[:, None] + 1 + guess[None, :], mask=is_taken)
    tl.store(row_of_ptr + place, row[:, None] + tl.zeros_like(place), mask=is_taken)
    empty = tl.arange(0, BLOCK_PLACES)
    is_empty = (empty >= tl.sum(taken)) & (empty < places)
    nothing = tl.zeros([BLOCK_PLACES], tl.int32)
    tl.store(tokens_ptr + rows + empty, nothing, mask=is_empty)
    tl.store(placed_ptr + rows + empty, nothing - 1, mask=is_empty)
    tl.store(row_of_ptr + rows + empty, nothing, mask=is_empty)
