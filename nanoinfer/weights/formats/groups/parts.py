"""Parts of a GroupStore, which tensors of a checkpoint fill."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.kernels.groups import MIDDLES, SPREADS, minima_of, pack, unpack
from nanoinfer.kernels.rounding import round_to_groups
from nanoinfer.weights.formats.groups.fields import OF_GROUPS, TARGETS, Field
from nanoinfer.weights.formats.groups.store import GroupStore
from nanoinfer.weights.shards import NUMBERS_AT_ONCE, SPREAD


@dataclass(frozen=True)
class Part:
    """What one tensor, or a slice of it, fills of a store. It may hold more than this rank needs, in whole integers.

    number: the section's; first: its first row in the store
    own: this rank's rows and columns of the checkpoint's matrix
    cover: the indices of the tensor in which they lie, along outputs and inputs
    """

    store: GroupStore
    field: Field
    number: int
    first: int
    own: tuple[range, range]
    cover: tuple[range, range]

    @property
    def shape(self) -> torch.Size:
        """That of the indices that fill it."""
        return torch.Size(self.field.shape_of(len(self.cover[0]), len(self.cover[1])))

    @property
    def whole(self) -> GroupStore:
        """The store."""
        return self.store

    def __getitem__(self, rows: slice) -> Part:
        outputs, inputs = self.cover
        if self.field.fills == "factors":
            return self
        is_inputs = self.field.turned or self.field.fills == "g_idx"
        return replace(self, cover=(outputs, inputs[rows]) if is_inputs else (outputs[rows], inputs))

    def copy_(self, stored: Tensor) -> None:
        """Write all of it, from any device."""
        steps = self.field.steps(self.store.own_group)
        begins = [some.start * step for some, step in zip(self.cover, steps, strict=True)]
        ends = [some.stop * step for some, step in zip(self.cover, steps, strict=True)]
        rows, inputs = (
            range(max(own.start, begin), min(own.stop, end))
            for own, begin, end in zip(self.own, begins, ends, strict=True)
        )
        if self.field.fills == "g_idx":
            self._write_g_idx(inputs, stored)
        elif self.field.fills == "factors":
            self._write_factors(stored)
        elif rows and inputs:
            self._write_tiles(stored, rows, inputs, begins)

    @property
    def likeness(self) -> Hashable:
        """What parts have in common whose numbers, scales or zeros lie alike; None: this one's go elsewhere."""
        store, (rows, inputs) = self.store, self._within
        if store.order is not None or store.group != store.own_group or self.field.fills not in TARGETS:
            return None
        if store.blocks is not None and store.blocks.shape[1] * store.own_block != store.in_features:
            return None
        return self.field, store.bits, store.own_group, store.in_features, rows.start, rows.stop, inputs.start

    @staticmethod
    def copy_all(parts: Sequence[Part], stored: Tensor) -> None:
        """Write all of several parts, whose likeness is one; stored: [parts, ...]"""
        first = parts[0]
        rows, inputs = first._within
        read = first.field.read(stored)[:, rows, inputs]
        if first.field.fills == "numbers":
            read = pack(read, first.store.bits)
        targets = [getattr(part.store, TARGETS[part.field.fills])[part.rows] for part in parts]
        torch._foreach_copy_(targets, list(read.unbind()))

    @property
    def _within(self) -> tuple[slice, slice]:
        """Where what this rank needs lies in what is read, along outputs, and along inputs or groups."""
        sizes = self.field.steps(self.store.own_group), self.own, self.cover
        rows, inputs = (
            slice(own.start - some.start * step, own.stop - some.start * step)
            for step, own, some in zip(*sizes, strict=True)
        )
        if self.field.fills not in TARGETS or self.field.fills == "numbers":
            return rows, inputs
        return rows, slice(0, getattr(self.store, TARGETS[self.field.fills]).shape[1])

    @property
    def rows(self) -> slice:
        """Those of the store."""
        return slice(self.first, self.first + len(self.own[0]))

    def _write_tiles(self, stored: Tensor, rows: range, inputs: range, begins: list[int]) -> None:
        """rows, inputs: those to write; begins: those where the tensor does"""
        step = self.field.steps(1)[0]
        many = max(NUMBERS_AT_ONCE // (max(len(inputs), 1) * step), 1)
        axis = int(self.field.turned)
        for first in range(0, len(self.cover[0]), many):
            tile = stored.narrow(axis, first, min(many, len(self.cover[0]) - first)).to(self.store.words.device)
            begin = begins[0] + first * step
            some = range(max(rows.start, begin), min(rows.stop, begin + tile.shape[axis] * step))
            if some:
                read = self.field.read(tile)[some.start - begin : some.stop - begin]
                self._write(some, inputs, read, begins[1])

    def _write(self, rows: range, inputs: range, read: Tensor, begin: int) -> None:
        """begin: the input at which the columns that were read begin"""
        first = self.first - self.own[0].start
        target = slice(rows.start + first, rows.stop + first)
        if self.field.fills == "numbers":
            own = range(inputs.start - self.own[1].start, inputs.stop - self.own[1].start)
            self.store.write_numbers(target, own, read[:, inputs.start - begin : inputs.stop - begin])
        else:
            self.store.write_scales(target, inputs, read, self.field.fills)

    def _write_factors(self, stored: Tensor) -> None:
        assert self.store.factors is not None
        self.store.factors[self.rows] = self.field.read(stored).flatten().to(self.store.factors.device)

    def _write_g_idx(self, inputs: range, stored: Tensor) -> None:
        assert self.store.order is not None
        own = slice(inputs.start - self.own[1].start, inputs.stop - self.own[1].start)
        groups, count = stored.cpu().long(), self.store.scales.shape[1]
        unknown = (groups < 0) | (groups >= count)
        if unknown.any():
            raise ValueError(
                f"{self.store.sections[self.number].name}.{self.field.name}: it has the group"
                f" {groups[unknown][0].item()}: must be from 0 to {count - 1}"
            )
        self.store.order.g_idx[self.number, own] = groups

    def unpacked(self) -> Tensor:
        """Return what may be infinite: scales, minima and factors."""
        rows, fills = self.rows, self.field.fills
        if fills == "factors":
            assert self.store.factors is not None
            return self.store.factors[rows]
        if fills == "minima":
            return self.store.unpacked_minima(rows)
        if fills == "blocks":
            assert self.store.blocks is not None
            return self.store.blocks[rows]
        return self.store.unpacked_scales(rows) if fills == "scales" else _zero_of(self.store)

    def draw(self, generator: torch.Generator) -> None:
        """Fill it with random numbers, so that the weights spread as those of PlainMatrix do."""
        store, rows = self.store, self.rows
        scale = SPREAD / SPREADS[store.layout.numbers]
        if self.field.fills == "numbers":
            words = store.words[rows]
            words.copy_(torch.randint(-(1 << 31), 1 << 31, words.shape, generator=generator, device=words.device))
            if store.layout.numbers == "int6":
                words &= 0x3F3F3F3F
        elif self.field.fills == "zeros":
            assert store.zeros is not None
            store.zeros[rows] = 1 << store.bits - 1
        elif self.field.fills == "minima":
            assert store.zeros is not None
            store.zeros[rows] = MIDDLES[store.layout.numbers] * scale
        elif self.field.fills == "blocks":
            assert store.blocks is not None
            store.blocks[rows] = 1
        elif self.field.fills == "factors":
            assert store.factors is not None
            store.factors[rows] = scale
        elif self.field.fills == "scales" and store.scales.dtype == torch.uint8:
            store.scales[rows] = 127 + round(math.log2(scale))
        elif self.field.fills == "scales":
            store.scales[rows] = torch.tensor(1.0 if store.factors is not None else scale).to(store.scales.dtype)
        else:
            assert store.order is not None
            inputs = torch.arange(self.own[1].start, self.own[1].stop)
            store.order.g_idx[self.number] = inputs // store.own_group

    @property
    def dtype(self) -> torch.dtype:
        """That of the checkpoint's tensor, of numbers, scales or zeros."""
        packing = self.field.along_inputs or self.field.along_outputs
        return self.store.scales.dtype if packing is None else packing.dtype

    def copy_to(self, stored: Tensor) -> None:
        """Write the numbers, scales or zeros of these rows, all of whose inputs this rank has."""
        store, rows = self.store, self.rows
        if self.field.fills in OF_GROUPS:
            of_groups = getattr(store, TARGETS[self.field.fills])[rows, :: store.own_group // store.group]
            stored.copy_(self.field.packed(of_groups) if self.field.fills == "zeros" else of_groups)
            return
        assert self.field.fills == "numbers"
        assert store.order is None
        many = max(NUMBERS_AT_ONCE // store.in_features, 1)
        for words, some in zip(store.words[rows].split(many), stored.split(many), strict=True):
            some.copy_(self.field.packed(unpack(words, store.bits, store.in_features)))


@dataclass(frozen=True)
class Rounded:
    """Rows of a store, which are written as a slice of a plain matrix is: in whole groups of the checkpoint's matrix.

    So each number is rounded alike, however many ranks share the matrix. What is not this rank's is left out.

    first: the first of the rows
    own: this rank's rows and columns of the checkpoint's matrix
    cover: the columns of the groups in which they lie
    """

    store: GroupStore
    first: int
    own: tuple[range, range]
    cover: range

    @property
    def shape(self) -> torch.Size:
        """The number of rows and columns that fill it."""
        return torch.Size([len(self.own[0]), len(self.cover)])

    @property
    def whole(self) -> GroupStore:
        """The store."""
        return self.store

    def start(self, dim: int) -> int:
        """Return where it begins in the checkpoint's matrix, along a dimension."""
        return self.own[0].start if dim == 0 else self.cover.start

    def __getitem__(self, rows: slice) -> Rounded:
        some = self.own[0][rows]
        return replace(self, first=self.first + some.start - self.own[0].start, own=(some, self.own[1]))

    def copy_(self, values: Tensor) -> None:
        """Write all of it, from any device and floating type."""
        many = max(NUMBERS_AT_ONCE // values.shape[1], 1)
        for first in range(0, len(values), many):
            some = values[first : first + many].to(self.store.words.device, torch.float32)
            self._round(slice(self.first + first, self.first + first + len(some)), some)

    def _round(self, rows: slice, values: Tensor) -> None:
        store, own = self.store, self.own[1]
        padded = F.pad(values, (0, -values.shape[1] % store.own_group))
        how = store.own_group, store.layout.numbers, store.scales.dtype, store.zeros is not None
        numbers, scales, zeros = round_to_groups(padded, *how)
        first = own.start - self.cover.start
        store.write_numbers(rows, range(len(own)), numbers[:, first : first + len(own)])
        store.write_scales(rows, own, scales)
        if zeros is not None:
            if "minima" in store.layout.fills:
                zeros = minima_of(zeros, scales)
            store.write_scales(rows, own, zeros, "zeros")
        if store.blocks is not None:
            store.blocks[rows] = 1

    def unpacked(self) -> Tensor:
        """Return what can be infinite of these rows."""
        return self.store.unpacked(slice(self.first, self.first + len(self.own[0])))


@dataclass(frozen=True)
class Expected:
    """A tensor that says nothing new. Whoever writes it is told if it does.

    name: the tensor's; shape: that of the indices that are written
    matrix: the shape of the checkpoint's matrix
    begin: the first of the indices
    """

    store: GroupStore
    name: str
    field: Field
    shape: torch.Size
    matrix: tuple[int, int]
    begin: int = 0

    @property
    def whole(self) -> GroupStore:
        """The store."""
        return self.store

    def __getitem__(self, rows: slice) -> Expected:
        some = range(self.begin, self.begin + self.shape[0])[rows]
        return replace(self, shape=torch.Size([len(some), *self.shape[1:]]), begin=some.start)

    def copy_(self, stored: Tensor) -> None:
        """Raise ValueError if the tensor holds something else than expected."""
        read = self.field.read(stored)
        wanted = self._values()
        unlike = (read != wanted.to(read.device)).flatten()
        if unlike.any():
            place = int(unlike.int().argmax())
            number = place if self.field.fills == "zeros" else self.begin + place
            what = f"its number {number} is {read.flatten()[place].item()}"
            needed = wanted.expand(read.shape).flatten()[place].item()
            raise ValueError(
                f"{self.name}: {what}: must be {needed}, by what quantization_config says of the checkpoint"
            )

    @property
    def likeness(self) -> Hashable:
        """All that `_values` depends on."""
        return self.field, self.shape, self.matrix, self.begin, self.store.own_group, self.store.bits

    @staticmethod
    def copy_all(parts: Sequence[Expected], stored: Tensor) -> None:
        """Raise ValueError as copy_ does, if one of several tensors, whose likeness is one, is not as expected."""
        read = parts[0].field.read(stored)
        unlike = (read != parts[0]._values().to(read.device)).flatten(1).any(dim=1)
        for part, one in zip(parts, stored, strict=True) if unlike.any() else ():
            part.copy_(one)

    def _values(self) -> Tensor:
        """Return what must be read, made anew: of all experts they would take hundreds of megabytes."""
        end = self.begin + self.shape[0]
        if self.field.fills == "g_idx":
            return torch.arange(self.begin, end) // self.store.own_group
        if self.field.fills == "shape":
            return torch.tensor(self.matrix[self.begin : end])
        return torch.tensor(1 << self.store.bits - 1)  # in each place the middle of the numbers

    def unpacked(self) -> Tensor:
        """Return a number that is finite."""
        return _zero_of(self.store)

    def draw(self, generator: torch.Generator) -> None:
        """Nothing is to be filled."""


@dataclass(frozen=True)
class ExpectedShape(Expected):
    """The shape of a matrix, which tools write beside packed numbers."""

    dtype = torch.int64

    def copy_to(self, stored: Tensor) -> None:
        """Write the shape."""
        stored.copy_(self._values())


def _zero_of(store: GroupStore) -> Tensor:
    return torch.zeros((), device=store.words.device)
