"""GroupLinearWeight: a GroupWeight that multiplies itself, by whichever way is the fastest."""

from __future__ import annotations

from torch import Tensor

from nanoinfer.kernels.add_pieces import add_pieces
from nanoinfer.kernels.groups import GroupWeight
from nanoinfer.kernels.launch import launch_in_between
from nanoinfer.kernels.linear.activation import Activation, gate_mul
from nanoinfer.kernels.linear.groups.cpu import cpu_linear
from nanoinfer.kernels.linear.groups.dense import dense_linear, dequantize
from nanoinfer.kernels.linear.groups.one_row import can_multiply_row, group_row_linear
from nanoinfer.kernels.linear.groups.one_wave import can_multiply, find_config, has_few_tiles, one_wave_triton
from nanoinfer.kernels.linear.groups.row import has_row_kernel
from nanoinfer.kernels.linear.operands.weight import Weight

MOST_TOKENS = 512  # from more on, cuBLAS and a dense copy are faster


class GroupLinearWeight(GroupWeight, Weight):
    """A weight that multiplies itself: see kernels.linear.weight.Weight."""

    __slots__ = ()

    def for_row(self, x: Tensor, alone: bool) -> Tensor | GroupWeight | None:
        """Return this weight, or what kernels.linear.one_row cannot multiply as a dense copy."""
        if alone and self._has_own_row_kernel(x):
            return None
        if has_row_kernel(self):
            return self
        dense = dequantize(self, x.dtype)
        launch_in_between(x.device)
        return dense

    def _has_own_row_kernel(self, x: Tensor) -> bool:
        return x.is_cuda and x.itemsize == 2 and can_multiply_row(self)

    def product(
        self, x: Tensor, bias: Tensor | None = None, activation: Activation | None = None, may_split: bool = False
    ) -> Tensor:
        """Compute kernels.linear.dispatch.linear."""
        if len(x) == 1 and self._has_own_row_kernel(x):
            return group_row_linear(x, self, bias, activation)
        if x.is_cuda and len(x) <= MOST_TOKENS and can_multiply(x.dtype, self):
            config = find_config(x, self, activation is None and (may_split or has_few_tiles(x, self)))
            out = one_wave_triton(x, self, config, bias, activation)
            return out if may_split or config.pieces == 1 else add_pieces(out, dtype=x.dtype)
        out = (dense_linear if x.is_cuda else cpu_linear)(x, self, bias)
        return gate_mul(out, activation) if activation else out
