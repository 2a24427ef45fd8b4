"""What a verifying step keeps: the tokens drawn behind guesses that held, and the first one behind these."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.drafting.pack import Places
from nanoinfer.kernels.launch import launch_options, next_power_of_2, wait_for_predecessor

NOTHING = -3  # in place of a token, where a row has kept fewer
_NOTHING, _NO_GUESS = tl.constexpr(NOTHING), tl.constexpr(-4)  # no draw is _NO_GUESS


class AdvancedRows(NamedTuple):
    """What moves on with the tokens that rows keep. All are int32.

    tokens: [slots, width], texts; lengths: [slots]; slots: [rows], of the rows' texts
    last_tokens, positions: [rows], of the last known token
    limits: [rows], how many guesses a row may have in a step
    """

    tokens: Tensor
    lengths: Tensor
    slots: Tensor
    last_tokens: Tensor
    positions: Tensor
    limits: Tensor


def accept_guesses(drawn: Tensor, places: Places, rows: AdvancedRows, kept: Tensor) -> None:
    """Keep each row's draws up to the first guess that is not the token drawn in its place, and move the row on.

    A token is drawn behind each place. Behind a guess that did not hold, it means nothing. A draw that is negative (see
    kernels.sampling.draw) is kept as the last one, and the row goes on with token 0.

    A row whose guesses have all held may have twice as many in its next step, others one more than have held.

    drawn: [places] int32, the tokens drawn from the logits of all places
    kept: [rows, most + 2] int32, gets the tokens that each row keeps, NOTHING behind these, and at the end how many
        guesses it had. An empty place of a row keeps nothing
    """
    (accept_guesses_triton if drawn.is_cuda else accept_guesses_reference)(drawn, places, rows, kept)


def accept_guesses_reference(drawn: Tensor, places: Places, rows: AdvancedRows, kept: Tensor) -> None:
    """accept_guesses in torch."""
    count, most = len(kept), kept.shape[1] - 2
    placed, guess = places.positions[:count], torch.arange(most, device=drawn.device)
    goes_on = placed >= 0
    at = (count + places.first[:, None] + guess).clamp(max=len(drawn) - 1)
    draws = torch.cat([drawn[:count, None], drawn[at]], dim=1)
    holds = (places.tokens[at] == draws[:, :-1]) & (guess < places.counts[:, None])
    held = holds.int().cumprod(dim=1).sum(dim=1).int()
    is_kept = (torch.arange(most + 1, device=drawn.device) <= held[:, None]) & goes_on[:, None]
    kept[:, :-1] = draws.where(is_kept, NOTHING)
    kept[:, -1] = places.counts
    last = draws.gather(1, held[:, None].long())[:, 0].clamp(min=0)
    rows.last_tokens.copy_(last.where(goes_on, rows.last_tokens))
    limits = torch.where(held == places.counts, (2 * rows.limits).clamp(max=most), held + 1)
    rows.limits.copy_(limits.where(places.counts > 0, rows.limits))
    row, column = is_kept.nonzero(as_tuple=True)
    rows.tokens[rows.slots[row], placed[row] + 1 + column.int()] = draws[row, column].clamp(min=0)
    rows.positions.copy_((placed + held + 1).where(goes_on, rows.positions))
    rows.lengths[rows.slots[goes_on]] = rows.positions[goes_on] + 1


def accept_guesses_triton(drawn: Tensor, places: Places, rows: AdvancedRows, kept: Tensor) -> None:
    """accept_guesses as one launch, of a program for each row."""
    count, most = len(kept), kept.shape[1] - 2
    _accept_kernel[(count,)](
        drawn,
        *places[:2],
        *places[3:],
        *rows,
        kept,
        count,
        rows.tokens.stride(0),
        MOST=most,
        BLOCK=next_power_of_2(most + 2),
        num_warps=1,
        **launch_options(drawn),
    )


@triton.jit(do_not_specialize=["rows"])
def _accept_kernel(
    drawn_ptr,
    guesses_ptr,
    placed_ptr,
    first_ptr,
    counts_ptr,
    tokens_ptr,
    lengths_ptr,
    slots_ptr,
    last_tokens_ptr,
    positions_ptr,
    limits_ptr,
    kept_ptr,
    rows,
    width,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY)
    row = tl.program_id(0)
    position, count = tl.load(placed_ptr + row), tl.load(counts_ptr + row)
    behind = rows + tl.load(first_ptr + row)  # the place of the row's first guess
    column = tl.arange(0, BLOCK)
    goes_on = position >= 0
    place = tl.where(column == 0, row, behind + column - 1)
    draw = tl.load(drawn_ptr + place, mask=column <= tl.where(goes_on, count, -1), other=_NOTHING)
    guess = tl.load(guesses_ptr + behind + column, mask=column < count, other=_NO_GUESS)
    held = tl.min(tl.where(guess == draw, BLOCK, column))
    is_kept = column <= tl.where(goes_on, held, -1)
    told = tl.where(column == MOST + 1, count, tl.where(is_kept, draw, _NOTHING))
    tl.store(kept_ptr + row * (MOST + 2) + column, told, mask=column < MOST + 2)
    if goes_on:
        last = tl.sum(tl.where(column == held, draw, 0))
        tl.store(last_tokens_ptr + row, tl.maximum(last, 0))
        tl.store(positions_ptr + row, position + held + 1)
        slot = tl.load(slots_ptr + row).to(tl.int64)
        tl.store(tokens_ptr + slot * width + position + 1 + column, tl.maximum(draw, 0), mask=is_kept)
        tl.store(lengths_ptr + slot, position + held + 2)
        limit = tl.load(limits_ptr + row)
        limit = tl.where(count == 0, limit, tl.where(held == count, tl.minimum(2 * limit, MOST), held + 1))
        tl.store(limits_ptr + row, limit)
