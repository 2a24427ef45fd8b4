"""RotatedMatrix: a matrix whose inputs, or outputs, are rotated when it multiplies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanoinfer.kernels.linear.operands.hadamard import signs
from nanoinfer.kernels.linear.operands.rotated import RotatedWeight
from nanoinfer.weights.formats.matrix import Matrix
from nanoinfer.weights.shards import ROWS_TOGETHER, Section, Shard

WHY = "model: quantization_config has a transform_config that rotates"


@dataclass(frozen=True)
class Side:
    """How a side of a matrix is rotated.

    tensor: what a checkpoint calls the rotation's own matrix, behind the module's name
    block: how many neighbours are rotated together; None: all
    """

    tensor: str
    block: int | None

    def find_block(self, what: str, size: int, start: int, share: int) -> int:
        """Return the block of a side. Raises ValueError, naming it, if it does not fit.

        what: names the side; size: of the whole matrix; start, share: where this rank's part begins, and its size
        """
        block = self.block or size
        if block & (block - 1):
            raise ValueError(f"{WHY} {what} in blocks of {block}: must be powers of two")
        if size % block or start % block or share % block:
            raise ValueError(f"{WHY} {what} in blocks of {block}: must divide the {share} that one product has")
        return block


class RotatedMatrix(Matrix):
    """Another matrix between rotations. The other one holds the weights, and does all that formats ask of them."""

    def __init__(self, inner: Matrix, inputs: Side | None, outputs: Side | None) -> None:
        super().__init__(inner.sections, inner.in_features)
        self.inner, self._sides = inner, (inputs, outputs)
        self._device = next(inner.parameters()).device
        first = self.sections[0]
        begin = first.start if first.dim == 1 else 0
        self._inputs: int | None = None
        if inputs is not None:
            self._inputs = inputs.find_block(f"the inputs of {first.name}", first.shape[1], begin, self.in_features)
        self._outputs = [] if outputs is None else [(one.rows, _of_outputs(outputs, one)) for one in self.sections]

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        """The other matrix's."""
        return self.inner.bias

    def operand(self) -> RotatedWeight:
        """Return the other matrix's operand between rotations."""
        return RotatedWeight(self.inner.operand(), self._inputs, self._outputs)

    def fix_order(self, sizes: list[int]) -> None:
        """Leave it to the other matrix: a rotation has one order."""

    def fix_parts(self) -> None:
        """Leave it to the other matrix."""

    def shards(self) -> Iterator[Shard]:
        """Yield those of the rotations' own matrices, which checkpoints may store: they must be Sylvester's."""
        inputs, outputs = self._sides
        for number, section in enumerate(self.sections):
            if inputs is not None and self._inputs is not None:
                yield self._shard_of(section, inputs, self._inputs)
            if outputs is not None:
                yield self._shard_of(section, outputs, self._outputs[number][1])

    def _shard_of(self, section: Section, side: Side, block: int) -> Shard:
        name, shape = f"{section.name}.{side.tensor}", torch.Size([block, block])
        target = _Sylvester(name, shape, self._device)
        return Shard(name, target, tuple(shape), random="zeros", optional=True, is_constant=True)


def _of_outputs(side: Side, section: Section) -> int:
    start = section.start if section.dim == 0 else 0
    return side.find_block(f"the outputs of {section.name}", section.shape[0], start, section.rows)


@dataclass(frozen=True, eq=False)
class _Sylvester:
    """A rotation's own matrix, which says nothing new. Whoever writes it is told if it does.

    name: the tensor's; shape: of the rows that are written; begin: the first of them
    device: of the weights beside it
    """

    name: str
    shape: torch.Size
    device: torch.device
    begin: int = 0

    @property
    def whole(self) -> _Sylvester:
        """All parts hold nothing."""
        return self

    def __getitem__(self, rows: slice) -> _Sylvester:
        some = range(self.begin, self.begin + self.shape[0])[rows]
        return replace(self, shape=torch.Size([len(some), self.shape[1]]), begin=some.start)

    def copy_(self, values: Tensor) -> None:
        """Raise ValueError if the rows are others than Sylvester's."""
        for first in range(0, len(values), ROWS_TOGETHER):
            some = values[first : first + ROWS_TOGETHER]
            rows = range(self.begin + first, self.begin + first + len(some))
            if not torch.equal(some.float(), signs(rows, self.shape[1], some.device)):
                raise ValueError(f"{self.name}: must be Sylvester's matrix of 1 and -1: nothing rotates by others here")

    def unpacked(self) -> Tensor:
        """Return no numbers: no parameter has them."""
        return torch.empty(0, device=self.device)
