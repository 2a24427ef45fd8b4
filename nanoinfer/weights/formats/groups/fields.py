"""Fields: the tensors that a checkpoint has for a matrix in groups, and how numbers lie in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.weights.shards import FLOATS

Fills = Literal["numbers", "scales", "zeros", "minima", "blocks", "factors", "g_idx", "shape"]
INT32, HALF_BYTE = 32, 4  # bits
OF_GROUPS: tuple[Fills, ...] = "scales", "zeros", "minima"
TARGETS: dict[Fills, str] = {  # of a GroupStore
    "numbers": "words", "scales": "scales", "zeros": "zeros", "minima": "zeros", "blocks": "blocks"
}  # fmt: skip
DTYPES: dict[Fills, frozenset[torch.dtype]] = {  # of tensors that hold one number in each place
    "numbers": frozenset({torch.int8}),
    "scales": FLOATS,
    "zeros": frozenset({torch.int8}),
    "minima": FLOATS,
    "blocks": frozenset({torch.float16}),
    "factors": FLOATS,
    "g_idx": frozenset({torch.int32, torch.int64}),
    "shape": frozenset({torch.int32, torch.int64}),
}


@dataclass(frozen=True)
class Packing:
    """Several numbers in one integer.

    bits: a number's, four or eight
    places: which of the integer's numbers has the lowest bits, which the next ones, and so on
    """

    bits: int
    places: tuple[int, ...]

    @classmethod
    def in_turn(cls, bits: int, integer: int) -> Packing:
        """Return that of neighbours, the first in the lowest bits; integer: the bits of one"""
        return cls(bits, tuple(range(integer // bits)))

    @property
    def count(self) -> int:
        """The numbers in one integer."""
        return len(self.places)

    def unpack(self, integers: Tensor) -> Tensor:
        """Return the numbers, [..., count * integers] uint8, of [..., integers]."""
        numbers = integers.unsqueeze(-1).contiguous().view(torch.uint8).flatten(-2)  # the lowest bits first
        if self.bits == HALF_BYTE:
            numbers = torch.stack([numbers & 15, numbers >> HALF_BYTE], dim=-1).flatten(-2)
        if self.places == tuple(range(self.count)):
            return numbers
        order = [self.places.index(number) for number in range(self.count)]
        return numbers.unflatten(-1, (-1, self.count))[..., order].flatten(-2)

    def pack(self, numbers: Tensor) -> Tensor:
        """Return the integers that `unpack` takes; the last one may have numbers of 0 behind those that are given."""
        padded = F.pad(numbers.to(torch.uint8), (0, -numbers.shape[-1] % self.count))
        numbers = padded.unflatten(-1, (-1, self.count))[..., list(self.places)].flatten(-2)
        if self.bits == HALF_BYTE:
            numbers = numbers[..., 0::2] | numbers[..., 1::2] << HALF_BYTE
        return numbers.contiguous().view(self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The integers'."""
        return torch.int32 if self.bits * self.count == INT32 else torch.uint8


@dataclass(frozen=True)
class Field:
    """A tensor that a checkpoint has for each matrix, [outputs, inputs], or [outputs, groups].

    name: how its name ends, which the matrix's weight has instead of "weight"
    fills: what of a GroupWeight it fills; factors: a single number; g_idx, [inputs]: the group of each input; shape:
        the matrix's
    constant: it says nothing new: zeros are the middle, g_idx the groups of neighbours. Few checkpoints may lack it
    turned: it is stored as [inputs, outputs]
    along_outputs, along_inputs: how numbers are packed along a dimension; None: one by one
    added: to each integer before it is unpacked
    divides: factors are one over what is stored
    block: if there is a further dimension, which takes the place of so many integers along the inputs, or has a block's
        factors
    span: the inputs of a block that has factors; None: another rule says what an index covers
    """

    name: str
    fills: Fills
    turned: bool = False
    along_outputs: Packing | None = None
    along_inputs: Packing | None = None
    added: int = 0
    divides: bool = False
    constant: bool = False
    block: int | None = None
    span: int | None = None

    def dtypes(self, scales: torch.dtype | None) -> frozenset[torch.dtype]:
        """Return the types of numbers that the tensor may have. scales: as in Layout"""
        if self.fills == "scales" and scales is not None and scales not in FLOATS:
            return frozenset({scales})  # bytes that stand for other numbers, and floats of few bits
        packing = self.along_inputs or self.along_outputs
        if packing is not None:
            return frozenset({packing.dtype})
        return DTYPES[self.fills]

    def steps(self, group: int) -> tuple[int, int]:
        """Return how many of a matrix's outputs and inputs an index of the tensor covers, in each dimension."""
        outputs = 1 if self.along_outputs is None else self.along_outputs.count
        inputs = 1 if self.along_inputs is None else self.along_inputs.count
        if self.span is not None:
            return outputs, self.span
        if self.fills in OF_GROUPS:
            return outputs, inputs * group
        return outputs, inputs * (self.block or 1)

    def shape_of(self, outputs: int, inputs: int) -> tuple[int, ...]:
        """Return the tensor's shape, of so many indices that cover outputs and inputs."""
        if self.fills == "factors":
            return (1,)
        if self.fills == "g_idx":
            return (inputs,)
        if self.fills == "shape":
            return (2,)
        shape = (inputs, outputs) if self.turned else (outputs, inputs)
        return shape if self.block is None else (*shape, self.block)

    def read(self, stored: Tensor) -> Tensor:
        """Return what is in a tensor, or in some indices of it, as [outputs, inputs], or groups; factors: [1, 1]."""
        if self.fills == "factors":
            factors = stored.float().reshape(1, 1)
            return 1 / factors if self.divides else factors
        if self.fills in ("g_idx", "shape", "blocks"):
            return stored
        if self.added:
            stored = _add(stored, self.added)
        if self.block is not None:
            stored = stored.flatten(-2)
        upright = stored.mT if self.turned else stored
        if self.along_outputs is not None:
            return self.along_outputs.unpack(upright.mT).mT
        return upright if self.along_inputs is None else self.along_inputs.unpack(upright)

    def packed(self, numbers: Tensor) -> Tensor:
        """Return what a tensor of numbers or zeros has for [outputs, inputs], or groups, if it packs them."""
        if self.along_outputs is not None:
            return self.along_outputs.pack(numbers.mT).mT
        assert self.along_inputs is not None
        integers = self.along_inputs.pack(numbers)
        return integers if self.block is None else integers.unflatten(-1, (-1, self.block))


def _add(integers: Tensor, number: int) -> Tensor:
    """Return sums with int32s, which may overflow, or those with the numbers of int8s as uint8."""
    return integers + number if integers.dtype == torch.int32 else integers.view(torch.uint8) + number
