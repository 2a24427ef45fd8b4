"""GatheredWeight: a weight whose inputs are in another order than the tokens' features."""

from __future__ import annotations

from torch import Tensor

from nanoinfer.kernels.linear.activation import Activation
from nanoinfer.kernels.linear.dispatch import linear
from nanoinfer.kernels.linear.operands.weight import Weight


class GatheredWeight(Weight):
    """The weight, and which feature each of its inputs is, [in_features] int32."""

    def __init__(self, weight: Weight, features: Tensor) -> None:
        self._weight, self._features = weight, features

    def product(
        self, x: Tensor, bias: Tensor | None = None, activation: Activation | None = None, may_split: bool = False
    ) -> Tensor:
        """Compute kernels.linear.dispatch.linear."""
        return linear(x.index_select(1, self._features), self._weight, bias, activation)
