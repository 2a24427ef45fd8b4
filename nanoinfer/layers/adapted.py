"""Matrices, experts and heads with adapters beside them, of which each row of a step names one or none."""

from __future__ import annotations

import threading

from torch import Tensor

from nanoinfer.kernels.adapters.experts import ExpertAdapters
from nanoinfer.kernels.adapters.linear import adapted_linear, adapted_norm_linear
from nanoinfer.kernels.adapters.pairs import AdapterRows, Pairs
from nanoinfer.kernels.adapters.products import expand, shrink
from nanoinfer.kernels.experts.route import Routes
from nanoinfer.kernels.linear.activation import Activation
from nanoinfer.kernels.norm.rms_norm import Norm
from nanoinfer.kernels.ranks.send_receive import VectorLane
from nanoinfer.layers.embedding import Head
from nanoinfer.weights.formats.experts import ExpertMap, Experts
from nanoinfer.weights.formats.matrix import LinearMap, Matrix


class StepRows(threading.local):
    """Which adapters the rows of a step name; None: no row names one. Threads may run steps side by side.

    tokens: of all tokens of the step
    wanted: of those whose logits are computed
    """

    tokens: AdapterRows | None = None
    wanted: AdapterRows | None = None


class AdaptedMatrix(LinearMap):
    """A matrix with adapters. Where no row names one, the product is the matrix's own."""

    def __init__(self, inner: Matrix, pairs: Pairs, step: StepRows) -> None:
        """pairs: those beside the matrix"""
        super().__init__()
        self.inner = inner
        self._pairs, self._step = pairs, step

    @property
    def takes_lanes(self) -> bool:
        """Whether norm_product of one row adds up the ranks' parts of x by itself."""
        return self._step.tokens is None and self.inner.takes_lanes

    def can_apply_activation(self, tokens: int) -> bool:
        """Return whether the launch before the product can apply an activation: that behind an adapter's does so."""
        return self._step.tokens is None and self.inner.can_apply_activation(tokens)

    def product(
        self,
        x: Tensor,
        activation: Activation | None = None,
        may_split: bool = False,
        with_bias: bool = True,
        before: Activation | None = None,
    ) -> Tensor:
        """Multiply, and add each row's adapter."""
        rows, inner = self._step.tokens, self.inner
        if rows is None:
            return inner.product(x, activation, may_split, with_bias, before)
        bias = inner.bias if with_bias else None
        return adapted_linear(x, inner.operand(), self._pairs, rows, bias, activation, may_split, before)

    def norm_product(
        self,
        x: Tensor,
        residual: Tensor | None,
        pre: Norm | None,
        post: Norm | None,
        activation: Activation | None,
        lane: VectorLane | None,
    ) -> tuple[Tensor, Tensor]:
        """Add, normalise and multiply, and add each row's adapter."""
        rows, inner = self._step.tokens, self.inner
        if rows is None:
            return inner.norm_product(x, residual, pre, post, activation, lane)
        assert lane is None
        return adapted_norm_linear(x, residual, pre, inner.operand(), self._pairs, rows, inner.bias, activation, post)


class AdaptedExperts(ExpertMap):
    """Experts with adapters. Where no row names one, the products are the experts' own."""

    def __init__(self, inner: Experts, gate_up: Pairs, down: Pairs, step: StepRows) -> None:
        """gate_up, down: as ExpertAdapters has them"""
        super().__init__()
        self.inner = inner
        self._gate_up, self._down, self._step = gate_up, down, step

    def fix_order(self, used: int, activation: Activation) -> None:
        """Let a GPU's products add up in one order, as Experts.fix_order does."""
        self.inner.fix_order(used, activation)

    def forward(self, x: Tensor, routes: Routes, activation: Activation, may_split: bool = False) -> Tensor:
        """Multiply, and add each row's adapter."""
        rows = self._step.tokens
        adapters = None if rows is None else ExpertAdapters(self._gate_up, self._down, rows)
        return self.inner(x, routes, activation, may_split, adapters)


class AdaptedHead(Head):
    """An output projection with adapters, of the dtype of its logits."""

    def __init__(self, inner: Head, pairs: Pairs, step: StepRows) -> None:
        """pairs: those beside the projection"""
        super().__init__()
        self.inner = inner
        self.first_id, self.num_ids = inner.first_id, inner.num_ids
        self._pairs, self._step = pairs, step

    def fix_order(self, sizes: list[int]) -> None:
        """Let a GPU's products for logits add up in the order of the inputs; sizes: as for InOrderWeight"""
        self.inner.fix_order(sizes)

    def fix_parts(self) -> None:
        """Let the CPU compute logits by parts, whose shapes do not depend on the number of ranks."""
        self.inner.fix_parts()

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Project, and add each row's adapter."""
        logits = self.inner.logits(hidden, out)  # first: a launch must come between AdapterRows and shrink
        if (rows := self._step.wanted) is None:
            return logits
        return expand(shrink(hidden.to(logits.dtype), self._pairs, rows), self._pairs, rows, logits)
