"""JoinedWeight: weights of one input, whose outputs lie side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanoinfer.kernels.linear.activation import Activation, gate_mul
from nanoinfer.kernels.linear.dispatch import AnyWeight, PlainWeight, linear
from nanoinfer.kernels.linear.one_row import SideBySide
from nanoinfer.kernels.linear.operands.weight import Weight


class JoinedWeight(Weight):
    """The weights, which are multiplied one by one, each by its own kernel."""

    def __init__(self, weights: Sequence[AnyWeight]) -> None:
        self._weights = weights

    def for_row(self, x: Tensor, alone: bool) -> SideBySide | None:
        """Return the weights as linear.one_row multiplies them, side by side, with what comes before."""
        own = (PlainWeight(weight) if isinstance(weight, Tensor) else weight for weight in self._weights)
        rows = [row for weight in own if (row := weight.for_row(x, alone=False)) is not None]
        return SideBySide(tuple(rows)) if len(rows) == len(self._weights) else None

    def product(
        self, x: Tensor, bias: Tensor | None = None, activation: Activation | None = None, may_split: bool = False
    ) -> Tensor:
        """Compute kernels.linear.dispatch.linear."""
        out = torch.cat([linear(x, weight) for weight in self._weights], dim=1)
        if bias is not None:
            out += bias
        return out if activation is None else gate_mul(out, activation)
