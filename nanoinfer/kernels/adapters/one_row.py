"""A single row's adapter, inside kernels.linear.one_row's launch.

Every program of that kernel has the whole x. So the first programs compute h = a x, a column each, and publish it:
the others find it where negative zeros were. A GPU starts programs in the order of their numbers, and those that
publish do so before they wait for others. They are no more than there are multiprocessors, so all of them run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.adapters.pairs import AdapterRows, Pairs, part_of
from nanoinfer.kernels.launch import next_power_of_2, num_multiprocessors
from nanoinfer.kernels.linear.activation import gated_row
from nanoinfer.kernels.ranks.send_receive import as_message, receive


class RowAdapter(NamedTuple):
    """The adapter of a single row, for one launch.

    slot: [1] int32, -1 for none; complete two launches before the product's
    h: [parts * rank] of AdapterRows.blanks
    """

    pairs: Pairs
    slot: Tensor
    h: Tensor

    @classmethod
    def of(cls, pairs: Pairs, rows: AdapterRows) -> RowAdapter:
        """Return the adapter of `rows`, which is one row."""
        assert pairs.a.is_contiguous()
        assert pairs.b.is_contiguous()
        return cls(pairs, rows.slots, rows.blanks.take(pairs.a.shape[1]))

    def shape(self, programs: int, row: int, threads: int, per_load: int | None, per_number: int) -> RowAdapterShape:
        """Return what the kernel is compiled for.

        row: the numbers of a row of the weight in a tile, a power of 2; threads: of a program
        per_load: the numbers of the weight that a thread loads at once; None: multiply_and_add cannot multiply them
        per_number: inputs of which the weight has the numbers in one
        """
        columns, loads = len(self.h), row // per_load if per_load else 0
        block = max(next_power_of_2(columns), min(threads, loads))
        publishers = min(columns, programs, num_multiprocessors(self.h.device)) if self.h.is_cuda else 1
        pairs, per_load = self.pairs, per_load if block <= loads else None
        return RowAdapterShape(pairs.parts, pairs.rank, publishers, block, per_load, per_number)


@dataclass(frozen=True)
class RowAdapterShape:
    """What linear.one_row's kernel is compiled for, if a row may have an adapter.

    parts, rank: of Pairs
    publishers: programs that compute h
    columns_block: room for the columns of h
    per_load, per_number: see RowAdapter.shape; where per_load is None, multiply_and_add multiplies nothing
    """

    parts: tuple[int, ...]
    rank: int
    publishers: int
    columns_block: int
    per_load: int | None
    per_number: int


@triton.jit
def load_a(a_ptr, slot, column, columns, in_features, k):
    """Load what makes a column of h, a row of a[slot]; zeros without a slot, or behind the last column."""
    row = tl.maximum(slot, 0).to(tl.int64) * columns + column
    has_any = (slot >= 0) & (column < columns)
    return tl.load(a_ptr + row * in_features + k, mask=k < tl.where(has_any, in_features, 0), other=0.0)


@triton.jit
def publish_h(x, a, a_ptr, slot, h_ptr, program, columns, in_features, k, PUBLISHERS: tl.constexpr):
    """Compute the columns of h that are a program's own; the first programs divide them.

    a: of load_a, for column `program`
    """
    has_any = (slot >= 0) & (program < PUBLISHERS)
    for column in range(program, tl.where(has_any, columns, 0), PUBLISHERS):
        tl.store(h_ptr + column, as_message(tl.sum(x.to(tl.float32) * a.to(tl.float32))))
        a = load_a(a_ptr, slot, column + PUBLISHERS, columns, in_features, k)


@triton.jit
def receive_h(h_ptr, slot, columns, dtype: tl.constexpr, COLUMNS_BLOCK: tl.constexpr):
    """Wait for h, and return it, rounded, [COLUMNS_BLOCK]; zeros without a slot."""
    column = tl.arange(0, COLUMNS_BLOCK)
    return receive(h_ptr + column, column < tl.where(slot >= 0, columns, 0), None, EMPTY=False).to(dtype)


@triton.jit
def load_b(
    b_ptr,
    slot,
    tile,
    weight_rows,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    COLUMNS_BLOCK: tl.constexpr,
    GATED: tl.constexpr,
):
    """Load b[slot] for the rows that linear.one_row.load_tile loads, [BLOCK_N, COLUMNS_BLOCK].

    A row's numbers stand in the columns of h that are its part's. Elsewhere are zeros.
    """
    place = tl.arange(0, BLOCK_N * COLUMNS_BLOCK)  # of one dimension, so that Triton loads what multiply_and_add adds
    n = tile * BLOCK_N + place // COLUMNS_BLOCK
    exists = n < tl.where(slot >= 0, weight_rows, 0)
    if GATED:
        n = gated_row(n, weight_rows)
    r = place % COLUMNS_BLOCK - part_of(n, PARTS) * RANK
    own = exists & (r >= 0) & (r < RANK)
    first = (slot.to(tl.int64) * weight_rows + n) * RANK
    return tl.reshape(tl.load(b_ptr + first + tl.where(own, r, 0), mask=own, other=0.0), [BLOCK_N, COLUMNS_BLOCK])


@triton.jit
def multiply_and_add(tile, x, terms, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PER_LOAD: tl.constexpr):
    """Return the products of a tile's rows with x, plus the sums of the rows of `terms`, [BLOCK_N] float32.

    A thread adds up its own numbers, then a term. So the sum over threads, which takes longer, is one for both.
    """
    COLUMNS: tl.constexpr = terms.shape[1]
    products = tl.reshape(
        tile.to(tl.float32) * x[None, :], [BLOCK_N, BLOCK_K // COLUMNS // PER_LOAD, COLUMNS, PER_LOAD]
    )
    return tl.sum(tl.sum(tl.sum(products, axis=3), axis=1) + terms, axis=1)
