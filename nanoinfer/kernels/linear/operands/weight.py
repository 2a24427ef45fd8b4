"""Weight: what multiplies itself, by whichever kernel is fastest; and a plain tensor's way to do so."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from nanoinfer.kernels.linear.activation import Activation, Function, activate, gate_mul
from nanoinfer.kernels.linear.one_row import OneRowWeight
from nanoinfer.kernels.norm.norm import Norm, add_norm, add_residual, norm_add_norm, normalize


class Weight(ABC):
    """What kernels.linear.dispatch leaves a product to. Most have `product` alone."""

    __slots__ = ()

    @abstractmethod
    def product(
        self, x: Any, bias: Tensor | None = None, activation: Activation | None = None, may_split: bool = False
    ) -> Tensor:
        """Compute x @ weight.T + bias, and the activation, as kernels.linear.dispatch.linear does.

        x: a tensor, or what `gated` or `normed` returned
        """

    def activated(self, x: Any, bias: Tensor | None, function: Function) -> Tensor:
        """Compute function(x @ weight.T + bias); function: as for kernels.linear.activation.activate"""
        return activate(self.product(x, bias), function)

    def for_row(self, x: Tensor, alone: bool) -> OneRowWeight | None:
        """Return what kernels.linear.one_row multiplies a single token's x by; None: `product` multiplies it, too.

        alone: nothing comes before the product, such as a norm
        """
        return None

    def gated(self, x: Tensor, before: Activation) -> Any:
        """Return the input of `product`, act(gate) * up; x: [tokens, 2 * in_features]"""
        return gate_mul(x, before)

    def normed(self, x: Tensor, residual: Tensor | None, norm: Norm | None, post: Norm | None) -> tuple[Any, Tensor]:
        """Return the input of `product`, and the total, as kernels.linear.dispatch.norm_linear has them."""
        return add_and_norm(x, residual, norm, post)


def add_and_norm(x: Tensor, residual: Tensor | None, norm: Norm | None, post: Norm | None) -> tuple[Tensor, Tensor]:
    """Return the input of norm_linear's product, and the total; makes one launch at most."""
    if residual is None:
        return x if norm is None else normalize(x, norm), x
    if norm is None:
        total = add_residual(x, residual, post)
        return total, total
    return add_norm(x, residual, norm) if post is None else norm_add_norm(x, residual, post, norm)
