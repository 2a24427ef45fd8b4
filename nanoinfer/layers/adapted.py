"""Matrices, experts and heads with adapters beside them, of which each row of a step names one or none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from nanoinfer.kernels.adapters.experts import ExpertAdapters
from nanoinfer.kernels.adapters.linear import adapted_linear, adapted_norm_linear
from nanoinfer.kernels.adapters.pairs import AdapterRows, Pairs
from nanoinfer.kernels.adapters.products import expand, shrink
from nanoinfer.kernels.linear.activation import Activation, AnyActivation
from nanoinfer.kernels.norm.norm import Norm
from nanoinfer.kernels.ranks.send_receive import VectorLane
from nanoinfer.layers.embedding import Head
from nanoinfer.weights.formats.experts import ExpertMap, Experts
from nanoinfer.weights.formats.matrix import LinearMap, Matrix, Product


class AdaptedMatrix(LinearMap):
    """A matrix with adapters."""

    def __init__(self, inner: Matrix, pairs: Pairs) -> None:
        """pairs: those beside the matrix"""
        super().__init__()
        self.inner = inner
        self._pairs = pairs

    def beside(self, adapters: AdapterRows | None) -> Product:
        """Return the product; where no row names an adapter, the matrix's own."""
        return self.inner if adapters is None else AdaptedProduct(self.inner, self._pairs, adapters)


class AdaptedProduct(Product):
    """The product with a matrix to which each row's adapter is added."""

    takes_lanes = False

    def __init__(self, inner: Matrix, pairs: Pairs, rows: AdapterRows) -> None:
        """pairs, rows: the adapters beside the matrix, and which of them the rows name"""
        self._inner, self._pairs, self._rows = inner, pairs, rows

    def can_apply_activation(self, tokens: int) -> bool:
        """Return that no launch before can: that behind an adapter's product does so."""
        return False

    def product(
        self,
        x: Tensor,
        activation: AnyActivation | None = None,
        may_split: bool = False,
        with_bias: bool = True,
        before: Activation | None = None,
    ) -> Tensor:
        """Multiply, and add each row's adapter."""
        inner = self._inner
        bias = inner.bias if with_bias else None
        return adapted_linear(x, inner.operand(), self._pairs, self._rows, bias, activation, may_split, before)

    def norm_product(
        self,
        x: Tensor,
        residual: Tensor | None,
        pre: Norm | None,
        post: Norm | None,
        activation: AnyActivation | None,
        lane: VectorLane | None,
    ) -> tuple[Tensor, Tensor]:
        """Add, normalise and multiply, and add each row's adapter."""
        assert lane is None
        inner, rows = self._inner, self._rows
        return adapted_norm_linear(x, residual, pre, inner.operand(), self._pairs, rows, inner.bias, activation, post)


class AdaptedExperts(ExpertMap):
    """Experts with adapters."""

    def __init__(self, inner: Experts, gate_up: Pairs, down: Pairs) -> None:
        """gate_up, down: as ExpertAdapters has them"""
        super().__init__()
        self.inner = inner
        self._gate_up, self._down = gate_up, down

    def beside(self, adapters: AdapterRows | None) -> Callable[..., Tensor]:
        """Return Experts.forward; where a row names an adapter, with the rows' adapters."""
        if adapters is None:
            return self.inner
        return partial(self.inner, adapters=ExpertAdapters(self._gate_up, self._down, adapters))

    def fix_order(self, used: int, activation: AnyActivation) -> None:
        """Let a GPU's products add up in one order, as Experts.fix_order does."""
        self.inner.fix_order(used, activation)


class AdaptedHead(Head):
    """An output projection with adapters, of the dtype of its logits."""

    def __init__(self, inner: Head, pairs: Pairs) -> None:
        """pairs: those beside the projection"""
        super().__init__()
        self.inner = inner
        self.first_id, self.num_ids = inner.first_id, inner.num_ids
        self._pairs = pairs

    def fix_order(self, sizes: list[int]) -> None:
        """Let a GPU's products for logits add up in the order of the inputs; sizes: as for InOrderWeight"""
        self.inner.fix_order(sizes)

    def fix_parts(self) -> None:
        """Let the CPU compute logits by parts, whose shapes do not depend on the number of ranks."""
        self.inner.fix_parts()

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Project without an adapter."""
        return self.inner.logits(hidden, out)

    def beside(self, adapters: AdapterRows | None) -> Callable[[Tensor, Tensor | None], Tensor]:
        """Return `logits`; where a row names an adapter, with the rows' adapters."""
        return self.logits if adapters is None else partial(self._adapted, adapters)

    def _adapted(self, rows: AdapterRows, hidden: Tensor, out: Tensor | None) -> Tensor:
        logits = self.inner.logits(hidden, out)  # first: a launch must come between AdapterRows and shrink
        return expand(shrink(hidden.to(logits.dtype), self._pairs, rows), self._pairs, rows, logits)
