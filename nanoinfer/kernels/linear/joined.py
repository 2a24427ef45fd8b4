"""JoinedWeight: weights of one input, whose outputs lie side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanoinfer.kernels.linear.activation import Activation, gate_mul
from nanoinfer.kernels.linear.dispatch import AnyWeight, linear
from nanoinfer.kernels.linear.weight import Weight


class JoinedWeight(Weight):
    """The weights, which are multiplied one by one, each by its own kernel."""

    def __init__(self, weights: Sequence[AnyWeight]) -> None:
        self._weights = weights

    def product(
        self, x: Tensor, bias: Tensor | None = None, activation: Activation | None = None, may_split: bool = False
    ) -> Tensor:
        """Compute kernels.linear.dispatch.linear."""
        out = torch.cat([linear(x, weight) for weight in self._weights], dim=1)
        if bias is not None:
            out += bias
        return out if activation is None else gate_mul(out, activation)
