"""Weight: a weight that multiplies itself, for it is no plain tensor, or adds up in an order of its own."""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol

from torch import Tensor

from nanoinfer.kernels.linear.activation import Activation, gate_mul
from nanoinfer.kernels.norm.rms_norm import Norm, add_residual, add_rms_norm, norm_add_rms_norm, rms_norm
from nanoinfer.kernels.ranks.send_receive import VectorLane


class Weight(Protocol):
    """What kernels.linear.dispatch leaves a product to; the arguments and results are those of its functions."""

    def linear(
        self, x: Tensor, bias: Tensor | None, activation: Activation | None, may_split: bool, before: Activation | None
    ) -> Tensor:
        """Compute kernels.linear.dispatch.linear."""
        ...

    def norm_linear(
        self,
        x: Tensor,
        residual: Tensor | None,
        norm: Norm | None,
        bias: Tensor | None,
        activation: Activation | None,
        post: Norm | None,
        lane: VectorLane | None,
    ) -> tuple[Tensor, Tensor]:
        """Compute kernels.linear.dispatch.norm_linear; lane: None, unless its Matrix takes lanes"""
        ...


class OwnProduct(Weight):
    """A weight that has one way to multiply any tokens, after what comes before."""

    @abstractmethod
    def product(self, x: Tensor, bias: Tensor | None = None, activation: Activation | None = None) -> Tensor:
        """Compute x @ weight.T + bias, and the activation, as kernels.linear.dispatch.linear does."""

    def linear(
        self, x: Tensor, bias: Tensor | None, activation: Activation | None, may_split: bool, before: Activation | None
    ) -> Tensor:
        """Compute kernels.linear.dispatch.linear; never returns pieces."""
        return self.product(x if before is None else gate_mul(x, before), bias, activation)

    def norm_linear(
        self,
        x: Tensor,
        residual: Tensor | None,
        norm: Norm | None,
        bias: Tensor | None,
        activation: Activation | None,
        post: Norm | None,
        lane: VectorLane | None,
    ) -> tuple[Tensor, Tensor]:
        """Compute kernels.linear.dispatch.norm_linear; lane: None"""
        assert lane is None
        normed, total = add_and_norm(x, residual, norm, post)
        return self.product(normed, bias, activation), total


def add_and_norm(x: Tensor, residual: Tensor | None, norm: Norm | None, post: Norm | None) -> tuple[Tensor, Tensor]:
    """Return the input of norm_linear's product, and the total; makes one launch at most."""
    if residual is None:
        return x if norm is None else rms_norm(x, norm), x
    if norm is None:
        total = add_residual(x, residual, post)
        return total, total
    return add_rms_norm(x, residual, norm) if post is None else norm_add_rms_norm(x, residual, post, norm)
