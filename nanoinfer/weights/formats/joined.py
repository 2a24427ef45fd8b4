"""JoinedMatrix: a matrix whose rows are of several formats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from nanoinfer.kernels.linear.cpu.in_parts import WeightInParts
from nanoinfer.kernels.linear.operands.joined import JoinedWeight
from nanoinfer.weights.formats.matrix import Matrix
from nanoinfer.weights.shards import Shard, bias_shards


class JoinedMatrix(Matrix):
    """Matrices of one input, one after the other. They hold the weights, and do all that formats ask of them."""

    def __init__(self, matrices: Sequence[Matrix], bias: bool) -> None:
        """matrices: without biases"""
        sections = [section for matrix in matrices for section in matrix.sections]
        super().__init__(sections, matrices[0].in_features)
        self._matrices = matrices
        for number, matrix in enumerate(matrices):
            self.add_module(str(number), matrix)
        rows = sum(section.rows for section in sections)
        self.bias = nn.Parameter(torch.empty(rows), requires_grad=False) if bias else None

    def operand(self) -> JoinedWeight | WeightInParts:
        """Return the matrices' operands side by side."""
        operands = [matrix.operand() for matrix in self._matrices]
        in_parts = [operand for operand in operands if isinstance(operand, WeightInParts)]
        return WeightInParts.side_by_side(in_parts) if len(in_parts) == len(operands) else JoinedWeight(operands)

    def fix_order(self, sizes: list[int]) -> None:
        """Leave it to the matrices: side by side, they have one order."""

    def fix_parts(self) -> None:
        """Leave it to the matrices."""

    def shards(self) -> Iterator[Shard]:
        """Yield those of the bias, if there is one."""
        if self.bias is not None:
            yield from bias_shards(self.bias, self.sections)
