"""RotatedWeight: a weight whose inputs, or outputs, a Hadamard matrix rotates."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanoinfer.kernels.linear.activation import Activation, gate_mul
from nanoinfer.kernels.linear.dispatch import AnyWeight, linear
from nanoinfer.kernels.linear.operands.hadamard import hadamard
from nanoinfer.kernels.linear.operands.weight import Weight


class RotatedWeight(Weight):
    """The weight, and what is rotated before and behind its product."""

    def __init__(self, weight: AnyWeight, inputs: int | None, outputs: Sequence[tuple[int, int]]) -> None:
        """inputs: the block that hadamard takes; None: they are not rotated

        outputs: how many neighbours each section has, and its block; none: they are not rotated
        """
        self._weight, self._inputs, self._outputs = weight, inputs, outputs

    def product(
        self, x: Tensor, bias: Tensor | None = None, activation: Activation | None = None, may_split: bool = False
    ) -> Tensor:
        """Compute kernels.linear.dispatch.linear, of what is rotated; the bias is rotated with the outputs."""
        if self._inputs is not None:
            x = hadamard(x, self._inputs)
        if not self._outputs:
            return linear(x, self._weight, bias, activation)
        sizes, blocks = zip(*self._outputs, strict=True)
        parts = linear(x, self._weight, bias).split(sizes, dim=1)
        out = torch.cat(list(map(hadamard, parts, blocks)), dim=1)
        return out if activation is None else gate_mul(out, activation)
