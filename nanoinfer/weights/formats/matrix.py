"""Matrix: what a linear layer multiplies by, in whatever format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from nanoinfer.kernels.adapters.pairs import AdapterRows
from nanoinfer.kernels.linear.activation import Activation, AnyActivation
from nanoinfer.kernels.linear.dispatch import AnyWeight, linear, norm_linear
from nanoinfer.kernels.norm.norm import Norm
from nanoinfer.kernels.ranks.send_receive import VectorLane
from nanoinfer.weights.shards import Section, Shard


class LinearMap(nn.Module, ABC):
    """What a linear layer multiplies by: a matrix of some format, or one with adapters beside it."""

    @abstractmethod
    def beside(self, adapters: AdapterRows | None) -> Product:
        """Return the product in a step whose rows name these adapters; None: no row names one."""


class Product(ABC):
    """The product with a matrix, and with those adapters beside it that the rows of a step name."""

    @property
    @abstractmethod
    def takes_lanes(self) -> bool:
        """Whether norm_product of one row adds up the ranks' parts of x by itself."""

    @abstractmethod
    def can_apply_activation(self, tokens: int) -> bool:
        """Return whether a launch that prepares so many tokens for the product can apply an activation to them, too.

        Never once the order is fixed.
        """

    @abstractmethod
    def product(
        self,
        x: Tensor,
        activation: AnyActivation | None = None,
        may_split: bool = False,
        with_bias: bool = True,
        before: Activation | None = None,
    ) -> Tensor:
        """Multiply, as kernels.linear.dispatch.linear does. with_bias: False if another rank adds the bias"""

    @abstractmethod
    def norm_product(
        self,
        x: Tensor,
        residual: Tensor | None,
        pre: Norm | None,
        post: Norm | None,
        activation: AnyActivation | None,
        lane: VectorLane | None,
    ) -> tuple[Tensor, Tensor]:
        """Add, normalise and multiply, as kernels.linear.dispatch.norm_linear does. lane: None unless takes_lanes"""


@runtime_checkable
class LookedUp(Protocol):
    """A matrix that can be an embedding."""

    def look_up(self, rows: Tensor) -> Tensor:
        """Return rows, [rows, in_features], in the model's dtype. rows: their numbers, of int32"""
        ...


class Derived(nn.Module, ABC):
    """What is made of matrices."""

    @abstractmethod
    def finish(self) -> None:
        """Make it once the matrices' tensors have been written, and they are finished: as for Matrix.finish."""


class Matrix(LinearMap, Product):
    """A weight, [out_features, in_features], and if wanted a bias, [out_features]: this rank's rows and columns.

    Its shards, and those of the modules in it, say which tensors of a checkpoint it stores, how a rank slices them, and
    how they are written, at the start and later.

    sections: its rows, in their order; in_features: this rank's
    """

    bias: Tensor | None
    takes_lanes: bool = False
    takes_adapters: bool = True  # False: it is an embedding

    def __init__(self, sections: list[Section], in_features: int) -> None:
        super().__init__()
        self.sections, self.in_features = sections, in_features

    def beside(self, adapters: AdapterRows | None) -> Product:
        """Return the matrix itself: no adapter is beside it."""
        return self

    @abstractmethod
    def operand(self) -> AnyWeight:
        """Return what a product reads: a tensor, or a weight that multiplies itself."""

    @abstractmethod
    def fix_order(self, sizes: list[int]) -> None:
        """Let a GPU's products add up in one order, whatever the number of tokens; called once, of a filled matrix.

        sizes: the numbers of tokens whose bits are compared
        Raises ValueError, naming the format, if they cannot.
        """

    @abstractmethod
    def fix_parts(self) -> None:
        """Let the CPU multiply by parts, whose shapes do not depend on the number of ranks; called before it is filled.

        Raises ValueError, naming the format, if it cannot.
        """

    @abstractmethod
    def shards(self) -> Iterator[Shard]:
        """Yield the shards that fill this module's own parameters."""

    def can_apply_activation(self, tokens: int) -> bool:
        """Return whether the launch before the product can apply an activation: here never."""
        return False

    def finish(self) -> None:
        """Do what is to be done once tensors have been written: at the start, and after each update.

        After sleep, the numbers may be any, until an update brings them. The shards must still write the matrix.
        """

    def product(
        self,
        x: Tensor,
        activation: AnyActivation | None = None,
        may_split: bool = False,
        with_bias: bool = True,
        before: Activation | None = None,
    ) -> Tensor:
        """Multiply by the operand."""
        return linear(x, self.operand(), self.bias if with_bias else None, activation, may_split, before)

    def norm_product(
        self,
        x: Tensor,
        residual: Tensor | None,
        pre: Norm | None,
        post: Norm | None,
        activation: AnyActivation | None,
        lane: VectorLane | None,
    ) -> tuple[Tensor, Tensor]:
        """Add, normalise and multiply by the operand."""
        return norm_linear(x, residual, pre, self.operand(), self.bias, activation, post, lane)
