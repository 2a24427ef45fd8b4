"""What the places of a verifying step have of the rows whose tokens they hold."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import cdiv, launch_options, wait_for_predecessor

BLOCK = 1024  # columns of a block table that a program copies


class RowColumns(NamedTuple):
    """What rows have, or places.

    block_tables: [rows, columns] int32
    temperatures: [rows] float32; seeds: [rows] int64
    deltas, adapters: [rows] int32, or None
    """

    block_tables: Tensor
    temperatures: Tensor
    seeds: Tensor
    deltas: Tensor | None
    adapters: Tensor | None

    def at(self, index: slice | Tensor) -> RowColumns:
        """Return what some of them have."""

        def of(column: Tensor | None) -> Any:
            return None if column is None else column[index]

        return RowColumns(*map(of, self))


def gather_rows(columns: RowColumns, row_of: Tensor) -> RowColumns:
    """Return what each place has of its row; row_of: [places] int32."""
    return (gather_rows_triton if row_of.is_cuda else gather_rows_reference)(columns, row_of)


def gather_rows_reference(columns: RowColumns, row_of: Tensor) -> RowColumns:
    """gather_rows in torch."""

    def of(column: Tensor | None) -> Any:
        return None if column is None else column.index_select(0, row_of)

    return RowColumns(*map(of, columns))


def gather_rows_triton(columns: RowColumns, row_of: Tensor) -> RowColumns:
    """gather_rows as one launch."""
    tables = columns.block_tables

    def of(column: Tensor | None) -> Any:
        return None if column is None else column.new_empty(len(row_of), *column.shape[1:])

    gathered = RowColumns(*map(of, columns))
    _gather_kernel[(len(row_of), cdiv(tables.shape[1], BLOCK))](
        row_of, *columns, *gathered, tables.shape[1], tables.stride(0), BLOCK=BLOCK, **launch_options(row_of)
    )
    return gathered


@triton.jit
def _gather_kernel(
    row_of_ptr,
    tables_ptr,
    temperatures_ptr,
    seeds_ptr,
    deltas_ptr,
    adapters_ptr,
    own_tables_ptr,
    own_temperatures_ptr,
    own_seeds_ptr,
    own_deltas_ptr,
    own_adapters_ptr,
    width,
    table_stride,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY)
    place, part = tl.program_id(0), tl.program_id(1)
    row = tl.load(row_of_ptr + place)
    column = part * BLOCK + tl.arange(0, BLOCK)
    blocks = tl.load(tables_ptr + row * table_stride + column, mask=column < width)
    tl.store(own_tables_ptr + place * width + column, blocks, mask=column < width)
    if part == 0:
        tl.store(own_temperatures_ptr + place, tl.load(temperatures_ptr + row))
        tl.store(own_seeds_ptr + place, tl.load(seeds_ptr + row))
        if deltas_ptr is not None:
            tl.store(own_deltas_ptr + place, tl.load(deltas_ptr + row))
        if adapters_ptr is not None:
            tl.store(own_adapters_ptr + place, tl.load(adapters_ptr + row))
