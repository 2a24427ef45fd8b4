"""The lines of a verifying step's logits that belong to some of its rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.drafting.pack import Places, blocks_of
from nanoinfer.kernels.launch import launch_options, wait_for_predecessor


def find_lines(places: Places, rows: Tensor, numbers: Tensor, count: int | None) -> tuple[Tensor, Tensor]:
    """Find where some rows have their lines: one behind each row's last token, then those behind guesses, as packed.

    rows: [n] int64, in ascending order
    numbers: [at least all rows] int32, of each row of the step among these; -1: it is none of them
    count: so many lines behind guesses are told. In place of those that are not there, the first row's first line comes
        again. None: as many as there are, for which the host waits
    Returns the lines' places, and the numbers of the rows that they belong to, both [lines] int64.
    """
    if not rows.is_cuda:
        return find_lines_reference(places, rows, numbers, count)
    assert count is not None, "a GPU's host does not wait"
    return find_lines_triton(places, rows, numbers, count)


def find_lines_reference(places: Places, rows: Tensor, numbers: Tensor, count: int | None) -> tuple[Tensor, Tensor]:
    """find_lines in torch."""
    num_rows = len(places.first)
    whose = numbers[places.row_of[num_rows:]].where(places.positions[num_rows:] >= 0, -1)
    at = (whose >= 0).nonzero()[:, 0]
    missing = 0 if count is None else count - len(at)
    behind, own = torch.cat([num_rows + at, rows[:1].expand(missing)]), torch.cat([whose[at], whose.new_zeros(missing)])
    return torch.cat([rows, behind]), torch.cat([torch.arange(len(rows)), own.long()])


def find_lines_triton(places: Places, rows: Tensor, numbers: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """find_lines as one launch, of one program."""
    num_rows = len(places.first)
    guesses = len(places.tokens) - num_rows
    at, own = (torch.empty(len(rows) + count, dtype=torch.int64, device=rows.device) for _ in range(2))
    _find_kernel[(1,)](
        places.positions,
        places.row_of,
        rows,
        numbers,
        at,
        own,
        num_rows,
        guesses,
        len(rows),
        count,
        **blocks_of(num_rows, guesses),
        **launch_options(rows),
    )
    return at, own


@triton.jit(do_not_specialize=["num_rows", "guesses", "own_rows", "count"])
def _find_kernel(
    positions_ptr,
    row_of_ptr,
    rows_ptr,
    numbers_ptr,
    at_ptr,
    own_ptr,
    num_rows,
    guesses,
    own_rows,
    count,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_PLACES: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY)
    number = tl.arange(0, BLOCK_ROWS)
    row = tl.load(rows_ptr + number, mask=number < own_rows)
    tl.store(at_ptr + number, row, mask=number < own_rows)
    tl.store(own_ptr + number, number.to(tl.int64), mask=number < own_rows)
    guess = tl.arange(0, BLOCK_PLACES)
    position = tl.load(positions_ptr + num_rows + guess, mask=guess < guesses, other=-1)
    row_of = tl.load(row_of_ptr + num_rows + guess, mask=position >= 0, other=0)
    whose = tl.load(numbers_ptr + row_of, mask=position >= 0, other=-1)
    is_own = (whose >= 0).to(tl.int32)
    line = own_rows + tl.cumsum(is_own, 0) - 1
    tl.store(at_ptr + line, (num_rows + guess).to(tl.int64), mask=is_own > 0)
    tl.store(own_ptr + line, whose.to(tl.int64), mask=is_own > 0)
    is_missing = (guess >= tl.sum(is_own)) & (guess < count)
    nothing = tl.zeros([BLOCK_PLACES], tl.int64)
    tl.store(at_ptr + own_rows + guess, nothing + tl.load(rows_ptr), mask=is_missing)
    tl.store(own_ptr + own_rows + guess, nothing, mask=is_missing)
