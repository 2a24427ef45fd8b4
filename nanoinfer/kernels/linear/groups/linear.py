"""GroupLinearWeight: a GroupWeight that multiplies itself, by whichever way is the fastest."""

from __future__ import annotations

from torch import Tensor

from nanoinfer.kernels.groups import GroupWeight
from nanoinfer.kernels.launch import launch_in_between
from nanoinfer.kernels.linear.activation import Activation, gate_mul
from nanoinfer.kernels.linear.groups.cpu import cpu_linear
from nanoinfer.kernels.linear.groups.dense import dense_linear, dequantize
from nanoinfer.kernels.linear.groups.one_row import can_multiply_row, group_row_linear
from nanoinfer.kernels.linear.groups.one_wave import can_multiply, find_cut, one_wave_triton
from nanoinfer.kernels.linear.groups.row import has_row_kernel
from nanoinfer.kernels.linear.one_row import is_one_row, one_row_linear, one_row_norm_linear
from nanoinfer.kernels.linear.weight import add_and_norm
from nanoinfer.kernels.norm.rms_norm import Norm
from nanoinfer.kernels.ranks.send_receive import VectorLane

MOST_TOKENS = 512  # from more on, cuBLAS and a dense copy are faster


class GroupLinearWeight(GroupWeight):
    """A weight that multiplies itself: see kernels.linear.weight.Weight."""

    __slots__ = ()

    def linear(
        self, x: Tensor, bias: Tensor | None, activation: Activation | None, may_split: bool, before: Activation | None
    ) -> Tensor:
        """Compute kernels.linear.dispatch.linear."""
        if before is not None:
            x = gate_mul(x, before)
        if x.is_cuda and len(x) == 1 and x.itemsize == 2 and can_multiply_row(self):
            return group_row_linear(x, self, bias, activation)
        if is_one_row(x):
            return one_row_linear(x, self._for_row(x), bias, activation)
        if x.is_cuda and len(x) <= MOST_TOKENS and can_multiply(x.dtype, self):
            cut = find_cut(x, self, may_split and activation is None)
            return one_wave_triton(x, self, cut, bias, activation)
        out = (dense_linear if x.is_cuda else cpu_linear)(x, self, bias)
        return gate_mul(out, activation) if activation else out

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
        """Compute kernels.linear.dispatch.norm_linear."""
        if is_one_row(x):
            return one_row_norm_linear(x, residual, norm, self._for_row(x), bias, activation, post, lane)
        assert lane is None
        normed, total = add_and_norm(x, residual, norm, post)
        return self.linear(normed, bias, activation, False, None), total

    def _for_row(self, x: Tensor) -> Tensor | GroupWeight:
        """Return what the kernel for one row multiplies: this weight, or if it cannot, a dense copy."""
        if has_row_kernel(self):
            return self
        dense = dequantize(self, x.dtype)
        launch_in_between(x.device)
        return dense
