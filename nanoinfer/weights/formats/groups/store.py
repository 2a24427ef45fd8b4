"""GroupStore: a matrix of few bits, whose groups of neighbouring inputs share a scale."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from nanoinfer.kernels.fp8 import as_bytes
from nanoinfer.kernels.groups import (
    BITS,
    LARGEST_POWER,
    GroupWeight,
    dequantize_reference,
    pack,
    scaled_minima,
    scales_of,
    unpack,
    words_of,
)
from nanoinfer.weights.formats.groups.fields import TARGETS, Fills
from nanoinfer.weights.formats.groups.layout import Layout
from nanoinfer.weights.formats.groups.order import InputOrder
from nanoinfer.weights.formats.made import Made, may_keep
from nanoinfer.weights.shards import NUMBERS_AT_ONCE, Section, rows_of

T = TypeVar("T")


class GroupStore(nn.Module):
    """The tensors of a GroupWeight, [rows, in_features], for rows of several tensors of a checkpoint.

    Groups are the checkpoint's, or smaller ones if a rank's share of the inputs does not begin and end with a group. If
    a checkpoint's groups are no neighbours, `order` says what the store makes of them.
    """

    zeros: Tensor | None
    factors: Tensor | None
    blocks: Tensor | None

    def __init__(self, sections: list[Section], in_features: int, layout: Layout, label: str) -> None:
        """sections: neighbouring rows, in their order; label: what messages call the format"""
        super().__init__()
        self.label = label
        self.sections, self.layout, self.in_features = sections, layout, in_features
        inputs, self.start = sections[0].shape[1], rows_and_inputs(sections[0], in_features)[1].start
        self.own_group = layout.group_of(inputs)  # the checkpoint's
        self.group = math.gcd(self.own_group, self.start, in_features)
        groups, fills = in_features // self.group, layout.fills
        self.order = None
        if "g_idx" in fills:
            groups = -(-inputs // self.own_group)
            self.order = InputOrder(len(sections), in_features, groups if in_features == inputs else None)
        rows = sum(section.rows for section in sections)
        self.words = _parameter(rows, words_of(in_features, self.bits), dtype=torch.int32)
        self.scales = _parameter(rows, groups, dtype=layout.scales or torch.get_default_dtype())
        self.zeros = None
        if "zeros" in fills or "minima" in fills:
            self.zeros = _parameter(rows, groups, dtype=self.scales.dtype if "minima" in fills else torch.uint8)
        self.factors = _parameter(rows, dtype=torch.float32) if "factors" in fills else None
        self.blocks, self.own_block = None, 0
        if layout.block is not None:
            self.own_block = layout.block.span or 0
            count = in_features // math.gcd(self.own_block, self.start, in_features)
            self.blocks = _parameter(rows, count, layout.block.block or 1, dtype=torch.float16)
        self._made = Made()
        self._keeps: bool | None = None  # what is made; None: nobody has asked for it

    @property
    def bits(self) -> int:
        """A number's."""
        return BITS[self.layout.numbers]

    @property
    def weight(self) -> GroupWeight | None:
        """What a product reads, whose inputs are as `order` says; None: no product can."""
        return self._all if self.order is None or self.order.is_one else None

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix in a floating type, with the inputs in the checkpoint's order."""
        if self.order is None:
            return dequantize_reference(self._all, dtype)
        if self.order.is_one:
            dense = dequantize_reference(self._all, dtype)
            return torch.empty_like(dense).index_copy_(1, self.order.columns.long(), dense)
        of_sections = zip(rows_of(self.sections), self.order.groups, strict=True)
        return torch.cat([dequantize_reference(self._one_by_one(rows, groups), dtype) for rows, groups in of_sections])

    def keeps(self, dtype: torch.dtype) -> bool:
        """Whether the CPU keeps the matrix in another dtype, too: it does if memory allows it at the first call."""
        if self._keeps is None:
            self._keeps = not self.words.is_cuda and may_keep((len(self.words), self.in_features), dtype)
        return self._keeps

    def remember(self, make: Callable[[], T]) -> T:
        """Return what `make` makes of the matrix, and make it anew only once the matrix has changed."""
        return self._made.of((self.words, self.scales, self.zeros, self.factors, self.blocks), make)

    @property
    def _all(self) -> GroupWeight:
        """All rows; each product of a step asks for them, so that nothing is sliced."""
        how = self.layout.numbers, self.in_features
        return GroupWeight(self.words, self.scales, self.zeros, self.factors, *how, self.blocks)

    def _weight(self, rows: slice) -> GroupWeight:
        return self._all.map(lambda part: part[rows])

    def _one_by_one(self, rows: slice, groups: Tensor) -> GroupWeight:
        """Return some rows, each input with a scale of its own. groups: of the inputs"""
        weight = self._weight(rows)
        zeros = None if weight.zeros is None else weight.zeros.index_select(1, groups)
        return weight._replace(scales=weight.scales.index_select(1, groups), zeros=zeros)

    def finish(self) -> None:
        """Bring the inputs into their order, once tensors have been written."""
        moved = None if self.order is None else self.order.settle(self.sections[0].name)
        if moved is not None:
            moved = moved.to(self.words.device)
            for words in self.words.split(max(NUMBERS_AT_ONCE // self.in_features, 1)):
                words.copy_(pack(unpack(words, self.bits, self.in_features)[:, moved], self.bits))

    def write_numbers(self, rows: slice, inputs: range, numbers: Tensor) -> None:
        """Write numbers, [rows, inputs] as `pack` takes them; inputs: of those that this rank has."""
        words, block = self.words[rows], 4 * 32 // self.bits  # numbers that `pack` puts into four words
        if self.order is None and inputs.start % block == 0 and inputs.stop in range(0, self.in_features, block):
            words[:, inputs.start // block * 4 : inputs.stop // block * 4] = pack(numbers, self.bits)
        elif self.order is None and len(inputs) == self.in_features:
            words.copy_(pack(numbers, self.bits))
        else:
            places = torch.arange(inputs.start, inputs.stop) if self.order is None else self.order.places(inputs)
            all_numbers = unpack(words, self.bits, self.in_features)
            all_numbers[:, places.to(words.device)] = numbers.to(all_numbers.dtype)
            words.copy_(pack(all_numbers, self.bits))

    def write_scales(self, rows: slice, inputs: range, stored: Tensor, fills: Fills = "scales") -> None:
        """Write the scales of those of this rank's groups that begin among some inputs; or what else `fills` says.

        stored: [rows, groups] of the checkpoint, or [rows, blocks, factors], from that of the first of the inputs on
        """
        target: Tensor = getattr(self, TARGETS[fills])
        start, size, own = self.start, self.in_features // target.shape[1], self.own_group
        if fills == "blocks":
            own = self.own_block
        elif self.order is not None:
            start, size = 0, own
        begin, end = -(-(inputs.start - start) // size), -(-(inputs.stop - start) // size)
        begin, end = max(begin, 0), min(end, target.shape[1])
        places = (torch.arange(begin, end) * size + start) // own - inputs.start // own
        if size != own:  # then groups have become several
            stored = as_bytes(stored).index_select(1, places.to(target.device)).view(stored.dtype)
        target[rows, begin:end] = stored[:, : end - begin].to(target.dtype)

    def unpacked(self, rows: slice = slice(None)) -> Tensor:
        """Return the scales and minima of some rows as float32: only they can be infinite."""
        scales, weight = self.unpacked_scales(rows), self._weight(rows)
        return torch.cat([scales, scaled_minima(weight)]) if weight.has_minima else scales

    def unpacked_minima(self, rows: slice) -> Tensor:
        """Return the minima of some rows as float32."""
        return scaled_minima(self._weight(rows))

    def unpacked_scales(self, rows: slice) -> Tensor:
        """Return the scales of some rows as float32, infinite where they are more than kernels multiply by."""
        scales = scales_of(self._weight(rows))
        if self.scales.dtype != torch.uint8:
            return scales
        return scales.masked_fill(scales > LARGEST_POWER, math.inf)


def _parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def rows_and_inputs(section: Section, in_features: int) -> tuple[range, range]:
    """Return which rows and columns of the checkpoint's matrix a section has. in_features: of this rank"""
    if section.dim == 0:
        return range(section.start, section.start + section.rows), range(in_features)
    return range(section.rows), range(section.start, section.start + in_features)
