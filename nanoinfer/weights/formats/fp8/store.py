"""Fp8Store: a matrix in eight bits (the e4m3 of Micikevicius et al., 2022), whose blocks have scales."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.kernels.fp8 import FP8, LARGEST, as_bytes
from nanoinfer.weights.formats.fp8.layout import Fp8Layout
from nanoinfer.weights.formats.made import Made
from nanoinfer.weights.shards import FLOATS, NUMBERS_AT_ONCE, Section, Shard, rows_of

T = TypeVar("T")


class Fp8Store(nn.Module):
    """weight, [rows, in_features] FP8; scales, [rows / block[0], in_features / block[1]] float32.

    A number times the scale of its block is the matrix's. The blocks are the checkpoint's, or smaller ones if a rank's
    share of a matrix, or the next section, does not begin with a block.
    """

    def __init__(self, sections: list[Section], in_features: int, layout: Fp8Layout) -> None:
        """sections: neighbouring rows, in their order"""
        super().__init__()
        self.sections, self.layout = sections, layout
        of_rows, of_columns = layout.own_block
        height, width = 0, 0
        for section in sections:
            row, column = _start(section)
            height = math.gcd(height, _piece(section.rows, row, of_rows))
            width = math.gcd(width, _piece(in_features, column, of_columns))
        self.block = height, width
        rows = sum(section.rows for section in sections)
        self.weight = nn.Parameter(torch.empty(rows, in_features, dtype=FP8), requires_grad=False)
        shape = rows // height, in_features // width
        self.scales = nn.Parameter(torch.empty(shape, dtype=torch.float32), requires_grad=False)
        self._made = Made()

    def dense(self, dtype: torch.dtype, rows: slice = slice(None)) -> Tensor:
        """Return some rows of the matrix in another dtype; the first and the last one are those of whole blocks."""
        first, end, _ = rows.indices(len(self.weight))
        height, width = self.block
        scales = self.scales[first // height : end // height]
        blocks = self.weight[first:end].to(torch.float32).view(len(scales), height, -1, width)
        return (blocks * scales[:, None, :, None]).to(dtype).view(end - first, -1)

    def remember(self, make: Callable[[], T]) -> T:
        """Return what `make` makes of the matrix, and make it anew only once the matrix has changed."""
        return self._made.of((self.weight, self.scales), make)

    @property
    def parts(self) -> list[Fp8Rows]:
        """The rows of each section."""
        parts = []
        for section, rows in zip(self.sections, rows_of(self.sections), strict=True):
            sizes = section.rows, self.weight.shape[1]
            own = tuple(range(at, at + size) for at, size in zip(_start(section), sizes, strict=True))
            cover = tuple(map(_cover, own, self.layout.own_block, section.shape))
            parts.append(Fp8Rows(self, rows.start, (own[0], own[1]), (cover[0], cover[1])))
        return parts

    def shards(self) -> Iterator[Shard]:
        """Yield the shards of the weights, which may come in any dtype, and of the scales, which come beside FP8."""
        for section, rows in zip(self.sections, self.parts, strict=True):
            scale = f"{section.name}.{self.layout.scale}"
            start = rows.start(section.dim)
            how = section.shape, start, section.dim
            numbers = Shard(f"{section.name}.weight", rows, *how, dtypes=FLOATS | {FP8}, needs=(scale,))
            yield numbers.within(section.part)
            yield self._scale_shard(scale, section, rows.first)

    def _scale_shard(self, name: str, section: Section, first: int) -> Shard:
        """Return the shard of a section's scales; first: its first row."""
        height = self.block[0]
        scales = self.scales[first // height : (first + section.rows) // height]
        start = _start(section)
        rows, columns = self.blocks_of(start, tuple(scales.shape), self.layout.block)
        shape = self.layout.scale_shape(section.shape)
        size = self.layout.block[section.dim]
        begin = 0 if size is None else start[section.dim] // size
        target = Fp8Scales(self, scales, rows, columns, len(shape))
        shard = Shard(name, target, shape, begin, min(section.dim, len(shape) - 1), optional=True)
        return shard.within(section.part)

    def unpacked(self) -> Tensor:
        """Return the matrix as float32."""
        return self.dense(torch.float32)

    def blocks_of(
        self, start: tuple[int, int], counts: tuple[int, ...], block: tuple[int | None, int | None]
    ) -> tuple[Tensor, Tensor]:
        """Return in which blocks of the checkpoint's matrix some of the store's blocks lie, in rows and in columns.

        start: the row and the column of the checkpoint's matrix where they begin; counts: how many they are
        block: as in Fp8Layout; the numbers of these blocks count from the first of them
        """
        rows, columns = (
            torch.tensor([0 if size is None else (at + i * own) // size - at // size for i in range(count)])
            for at, own, size, count in zip(start, self.block, block, counts, strict=True)
        )
        return rows, columns


def _start(section: Section) -> tuple[int, int]:
    """Return the row and the column of the checkpoint's matrix where a section begins."""
    return (section.start, 0) if section.dim == 0 else (0, section.start)


def _cover(own: range, block: int | None, size: int) -> range:
    """Return the rows, or columns, of the blocks in which some lie; size: of all of them."""
    if block is None:
        return range(size)
    return range(own.start // block * block, min(-(-own.stop // block) * block, size))


def _piece(size: int, start: int, block: int | None) -> int:
    """Return the largest size of equal pieces, none of which lies in two blocks; start: of the first one."""
    return math.gcd(size, *(range(block - start % block, size, block) if block else ()))


@dataclass(frozen=True)
class Fp8Rows:
    """Rows of a store, which are written as a slice of a tensor is: of the checkpoint's tensor, in whole blocks.

    So each number is rounded alike, however many ranks share the matrix. What is not this rank's is left out.

    first: the first of the rows
    own: this rank's rows and columns of the checkpoint's matrix
    cover: those of the blocks in which they lie
    """

    store: Fp8Store
    first: int
    own: tuple[range, range]
    cover: tuple[range, range]

    @property
    def shape(self) -> torch.Size:
        """The number of rows and columns that fill it."""
        return torch.Size(map(len, self.cover))

    @property
    def whole(self) -> Fp8Store:
        """The store."""
        return self.store

    @property
    def rows(self) -> slice:
        """The rows of the store."""
        return slice(self.first, self.first + len(self.own[0]))

    def start(self, dim: int) -> int:
        """Return where what fills it begins in the checkpoint's matrix, along a dimension."""
        return self.cover[dim].start

    def __getitem__(self, rows: slice) -> Fp8Rows:
        cover, own = self.cover[0][rows], self.own[0]
        some = range(max(own.start, cover.start), min(own.stop, cover.stop))
        return Fp8Rows(self.store, self.first + some.start - own.start, (some, self.own[1]), (cover, self.cover[1]))

    def copy_(self, values: Tensor) -> None:
        """Write all of these rows, from any device. What is not FP8 is quantized, and gets scales of its own."""
        if values.dtype == FP8:
            self._write(values)
            return
        together = self.store.layout.own_block[0]  # rows that share scales
        step = max(NUMBERS_AT_ONCE // (together * values.shape[1]), 1) * together
        for first in range(0, len(values), step):
            some = slice(first, first + step)
            self[some]._quantize(values[some].to(self.store.weight.device, torch.float32))

    def _quantize(self, values: Tensor) -> None:
        """Write numbers of float32."""
        store = self.store
        assert self.first % store.block[0] == self.rows.stop % store.block[0] == 0
        height, width = store.layout.own_block[0], store.layout.own_block[1] or values.shape[1]
        padded = F.pad(values, (0, -values.shape[1] % width, 0, -values.shape[0] % height))
        largest = padded.abs().view(len(padded) // height, height, -1, width).amax((1, 3))
        scales = (largest / LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
        divisors = scales.repeat_interleave(height, 0).repeat_interleave(width, 1)[: len(values), : values.shape[1]]
        self._write((values / divisors).clamp_(-LARGEST, LARGEST).to(FP8))
        blocks = store.scales[self.first // store.block[0] : self.rows.stop // store.block[0]]
        start = self.own[0].start, self.own[1].start
        rows, columns = store.blocks_of(start, tuple(blocks.shape), store.layout.own_block)
        blocks.copy_(scales[rows.to(scales.device)][:, columns.to(scales.device)])

    def _write(self, in_fp8: Tensor) -> None:
        """Write those of the numbers that are this rank's."""
        as_bytes(self.store.weight)[self.rows].copy_(as_bytes(in_fp8)[self._within])

    @property
    def _within(self) -> tuple[slice, ...]:
        """Where this rank's numbers lie in what fills these rows."""
        return tuple(
            slice(own.start - cover.start, own.stop - cover.start)
            for own, cover in zip(self.own, self.cover, strict=True)
        )

    def unpacked(self) -> Tensor:
        """Return a copy of these rows as float32, without their scales."""
        return self.store.weight[self.rows].float()

    @property
    def dtype(self) -> torch.dtype:
        """That of the numbers."""
        return FP8

    def copy_to(self, stored: Tensor) -> None:
        """Write those of the numbers that are this rank's into what fills these rows."""
        as_bytes(stored)[self._within].copy_(as_bytes(self.store.weight)[self.rows])


@dataclass(frozen=True)
class Fp8Scales:
    """The scales of a section, written from those blocks of a checkpoint in which this rank's rows or columns lie.

    scales: the store's; rows, columns: for each of them, the checkpoint's block, from the first needed one on
    dims: of the checkpoint's tensor
    """

    store: Fp8Store
    scales: Tensor
    rows: Tensor
    columns: Tensor
    dims: int

    @property
    def shape(self) -> torch.Size:
        """That of the needed part of the checkpoint's tensor."""
        counts = int(self.rows[-1]) + 1, int(self.columns[-1]) + 1
        return torch.Size(counts[: self.dims])

    @property
    def whole(self) -> Fp8Store:
        """The store."""
        return self.store

    def __getitem__(self, rows: slice) -> Fp8Scales:
        first, end, _ = rows.indices(self.shape[0])
        some = ((self.rows >= first) & (self.rows < end)).nonzero().flatten()
        part = self.scales[int(some[0]) : int(some[-1]) + 1]
        return Fp8Scales(self.store, part, self.rows[some] - first, self.columns, self.dims)

    def copy_(self, values: Tensor) -> None:
        """Write all of these scales, from any device and dtype."""
        blocks = values.float().reshape(self.shape if self.dims == 2 else (1, 1)).to(self.scales.device)
        rows, columns = self.rows.to(blocks.device), self.columns.to(blocks.device)
        self.scales.copy_(blocks[rows][:, columns])

    def unpacked(self) -> Tensor:
        """Return the scales as they are."""
        return self.scales

    @property
    def dtype(self) -> torch.dtype:
        """That of the scales."""
        return self.scales.dtype

    def copy_to(self, stored: Tensor) -> None:
        """Write the scales of these blocks of the checkpoint, each of which has one."""
        stored[self.rows[:, None], self.columns] = self.scales.to(stored.device)
