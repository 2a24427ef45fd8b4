"""A weight on the CPU, in the order in which oneDNN's product reads it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanoinfer.kernels.linear.activation import Activation, gate_mul
from nanoinfer.kernels.linear.operands.weight import Weight

INPUTS = 256  # of a float32 block: oneDNN adds up a block's products one by one, so more inputs round worse
ROWS = 16  # oneDNN packs a weight for about so many rows; other numbers only cost some speed


class PackedWeight(Weight):
    """Blocks of the weight's columns. A product reads them up to 2.8 times as fast as the weight itself."""

    def __init__(self, weight: Tensor) -> None:
        """Pack a copy of weight, [out_features, in_features] float32 or bfloat16."""
        self.shape = weight.shape
        # Sums of bfloat16 are float32's, and rounded at the end of a block: one block rounds them once.
        self._inputs = INPUTS if weight.dtype == torch.float32 else weight.shape[1]
        self._blocks = [_pack(block) for block in weight.split(self._inputs, dim=1)]

    def __getitem__(self, rows: slice) -> PackedRows:
        """Return neighbouring rows, to be read or written."""
        first, end, _ = rows.indices(self.shape[0])
        return PackedRows(self, first, end)

    def unpacked(self, rows: slice = slice(None)) -> Tensor:
        """Return a copy of neighbouring rows."""
        return torch.cat([block.to_dense()[rows] for block in self._blocks], dim=1)

    def write(self, rows: slice, values: Tensor) -> None:
        """Write neighbouring rows. Only one block at a time is not packed."""
        for index, columns in enumerate(values.split(self._inputs, dim=1)):
            block = self._blocks[index].to_dense()
            block[rows] = columns.to(block)
            self._blocks[index] = _pack(block)

    def product(
        self, x: Tensor, bias: Tensor | None = None, activation: Activation | None = None, may_split: bool = False
    ) -> Tensor:
        """Compute kernels.linear.dispatch.linear."""
        multiply = torch.ops.mkldnn._linear_pointwise
        first, *others = zip(x.split(self._inputs, dim=1), self._blocks, strict=True)
        out: Tensor = multiply(*first, bias, "none", [], "")
        for columns, block in others:
            out = multiply.binary(columns, out, block, None, "add")
        return gate_mul(out, activation) if activation else out


@dataclass(frozen=True)
class PackedRows:
    """Rows `first` to `end` of a packed weight, which are written as a slice of a tensor is."""

    weight: PackedWeight
    first: int
    end: int

    @property
    def shape(self) -> torch.Size:
        """[rows, in_features], as a tensor has it."""
        return torch.Size((self.end - self.first, self.weight.shape[1]))

    @property
    def whole(self) -> PackedWeight:
        """The whole weight."""
        return self.weight

    def __getitem__(self, rows: slice) -> PackedRows:
        first, end, _ = rows.indices(self.shape[0])
        return PackedRows(self.weight, self.first + first, self.first + end)

    def copy_(self, values: Tensor) -> None:
        """Write all of these rows, from any dtype and device."""
        self.weight.write(slice(self.first, self.end), values)

    def unpacked(self) -> Tensor:
        """Return a copy of these rows."""
        return self.weight.unpacked(slice(self.first, self.end))


def _pack(block: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(block.contiguous(), ROWS)
    return packed


def can_pack(weight: Tensor) -> bool:
    """Whether to pack a weight, [out_features, in_features]: oneDNN gains nothing where outputs are few."""
    out_features, in_features = weight.shape
    is_float32 = weight.device.type == "cpu" and weight.dtype == torch.float32
    return is_float32 and out_features >= 2 * in_features and torch.backends.mkldnn.is_available()


def packed_copy(made: Tensor) -> Tensor | PackedWeight:
    """Return what multiplies fastest of numbers that were made of a store, [out_features, in_features].

    A bfloat16 weight is packed in every shape: oneDNN would else bring it into this order at each product.
    """
    is_bfloat16 = made.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return PackedWeight(made) if is_bfloat16 or can_pack(made) else made
