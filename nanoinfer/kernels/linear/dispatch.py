"""Matrix products, with the norm before and the activation after, by whichever kernel is fastest for the shape."""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.kernels.linear import gated
from nanoinfer.kernels.linear.activation import Activation, AnyActivation, Function, Ungated, gate_mul
from nanoinfer.kernels.linear.few_outputs import few_outputs_linear, find_tiling
from nanoinfer.kernels.linear.in_order.weight import InOrderWeight
from nanoinfer.kernels.linear.one_row import is_one_row, one_row_linear, one_row_norm_linear
from nanoinfer.kernels.linear.one_wave import find_one_wave, one_wave_linear
from nanoinfer.kernels.linear.operands.weight import Weight, add_and_norm
from nanoinfer.kernels.norm.norm import Norm
from nanoinfer.kernels.ranks.send_receive import VectorLane

AnyWeight: TypeAlias = Tensor | Weight
IN_CUBLAS = "gelu_tanh", "relu"  # what it applies to its products, before it rounds them
MAX_LANE_FEATURES = 2048  # of 4,096, every program's looks at the inbox cost more than a launch (measured on H200s)


class PlainWeight(Weight):
    """A tensor, [out_features, in_features]."""

    __slots__ = ("_weight",)

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def for_row(self, x: Tensor, alone: bool) -> Tensor:
        """Return the tensor."""
        return self._weight

    def product(
        self, x: Tensor, bias: Tensor | None = None, activation: Activation | None = None, may_split: bool = False
    ) -> Tensor:
        """Compute linear."""
        weight = self._weight
        if may_split and activation is None and (tiling := find_tiling(x, weight)):
            return few_outputs_linear(x, weight, tiling, bias)
        if wave := find_one_wave(x, weight, activation is not None, may_split):
            return one_wave_linear(x, weight, wave, bias, activation)
        if activation is not None and bias is None and gated.is_faster(x, weight):
            return gated.gated_linear(x, weight, activation)
        out = F.linear(x, weight, bias)
        return gate_mul(out, activation) if activation else out

    def activated(self, x: Tensor, bias: Tensor | None, function: Function) -> Tensor:
        """Compute function(x @ weight.T + bias), in one launch if cuBLAS knows the function."""
        is_wide = x.is_cuda and x.itemsize == 2 and find_one_wave(x, self._weight) is None
        if bias is not None and function in IN_CUBLAS and is_wide:
            return torch._addmm_activation(bias, x, self._weight.t(), use_gelu=function == "gelu_tanh")
        return super().activated(x, bias, function)


def linear(
    x: Tensor,
    weight: AnyWeight,
    bias: Tensor | None = None,
    activation: AnyActivation | None = None,
    may_split: bool = False,
    before: Activation | None = None,
) -> Tensor:
    """Compute x @ weight.T + bias: [tokens, in_features] and [out_features, in_features] to [tokens, out_features].

    bias: [out_features]
    activation: the weight and the bias have gates in their first half and ups in the second. The result is
        act(gate) * up, [tokens, out_features // 2], see activation.py. Of Ungated, the result is act(product)
    may_split: the result may also be pieces, [pieces, tokens, out_features] float32, which add up to the product. The
        kernels in kernels.norm, which add a residual anyway, add them too
    before: if given, x has gates in its first half and ups in its second, [tokens, 2 * in_features]: what is multiplied
        is act(gate) * up
    """
    own = PlainWeight(weight) if isinstance(weight, Tensor) else weight
    if before is not None and len(x) == 1:
        x, before = gate_mul(x, before), None
    if is_one_row(x) and (row := own.for_row(x, alone=True)) is not None:
        return one_row_linear(x, row, bias, activation)
    given = x if before is None else own.gated(x, before)
    if isinstance(activation, Ungated):
        return own.activated(given, bias, activation.function)
    return own.product(given, bias, activation, may_split)


def norm_linear(
    x: Tensor,
    residual: Tensor | None,
    norm: Norm | None,
    weight: AnyWeight,
    bias: Tensor | None = None,
    activation: AnyActivation | None = None,
    post: Norm | None = None,
    lane: VectorLane | None = None,
) -> tuple[Tensor, Tensor]:
    """Return linear(normalize(total, norm), weight, bias, activation) and total = x + residual.

    The norm's stream_scale, if there is one, multiplies the total.

    x: [tokens, in_features], or with a residual also pieces that add up to it
    residual: [tokens, in_features]; None: the total is x
    norm: None: the total itself is multiplied
    post: if given, the total is normalize(x, post) + residual; needs a residual
    lane: if given, x stands for the sum of all ranks' x; only where takes_lane(x)
    """
    assert post is None or residual is not None
    own = PlainWeight(weight) if isinstance(weight, Tensor) else weight
    if is_one_row(x) and (row := own.for_row(x, alone=False)) is not None:
        return one_row_norm_linear(x, residual, norm, row, bias, activation, post, lane)
    assert lane is None
    normed, total = own.normed(x, residual, norm, post)
    if isinstance(activation, Ungated):
        return own.activated(normed, bias, activation.function), total
    return own.product(normed, bias, activation), total


def norm_and_linear(
    x: Tensor,
    residual: Tensor | None,
    norm: Norm | None,
    weight: Tensor | InOrderWeight,
    post: Norm | None = None,
    lane: VectorLane | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return norm_linear's product, or pieces of it; the product's input, normalize(total, norm); and the total.

    weight: of x's dtype or of float32, in which the product is computed then
    """
    if isinstance(weight, Tensor) and is_one_row(x):
        normed = torch.empty_like(x)
        out, total = one_row_norm_linear(x, residual, norm, weight, bias, post=post, lane=lane, normed=normed)
        return out, normed, total
    assert lane is None
    normed, total = add_and_norm(x, residual, norm, post)
    return linear(normed.to(weight.dtype), weight, bias, may_split=True), normed, total


def takes_lane(x: Tensor) -> bool:
    """Return whether norm_linear can add up the ranks' parts of x, [tokens, in_features]."""
    return is_one_row(x) and x.shape[1] <= MAX_LANE_FEATURES
