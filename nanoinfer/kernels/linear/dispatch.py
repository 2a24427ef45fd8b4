"""Matrix products, with the norm before and the activation after, by whichever kernel is fastest for the shape.

Those of an InOrderWeight or Fp8InOrderWeight take that which keeps their order.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.kernels.fp8 import Fp8Weight, quantize
from nanoinfer.kernels.linear.activation import Activation, fp8_gate_mul_triton, gate_mul
from nanoinfer.kernels.linear.fp8_in_order import Fp8InOrderWeight
from nanoinfer.kernels.linear.fp8_linear import fp8_linear
from nanoinfer.kernels.linear.in_order import InOrderWeight
from nanoinfer.kernels.linear.in_parts import WeightInParts
from nanoinfer.kernels.linear.one_row import MAX_IN_FEATURES, one_row_linear, one_row_norm_linear
from nanoinfer.kernels.linear.one_wave import find_one_wave, one_wave_linear
from nanoinfer.kernels.linear.packed import PackedWeight
from nanoinfer.kernels.norm.rms_norm import (
    Norm,
    add_residual,
    add_rms_norm,
    fp8_norm_triton,
    norm_add_rms_norm,
    rms_norm,
)
from nanoinfer.kernels.ranks.send_receive import VectorLane

AnyWeight: TypeAlias = Tensor | PackedWeight | WeightInParts | InOrderWeight | Fp8Weight | Fp8InOrderWeight
MAX_LANE_FEATURES = 2048  # of 4,096, every program's looks at the inbox cost more than a launch (measured on H200s)


def linear(
    x: Tensor,
    weight: AnyWeight,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    may_split: bool = False,
    before: Activation | None = None,
) -> Tensor:
    """Compute x @ weight.T + bias: [tokens, in_features] and [out_features, in_features] to [tokens, out_features].

    weight: if in FP8, one that can_multiply_fp8; several tokens are rounded to FP8 too
    bias: [out_features]
    activation: the weight and the bias have gates in their first half and ups in the second. The result is
        act(gate) * up, [tokens, out_features // 2], see activation.py
    may_split: the result may also be pieces, [pieces, tokens, out_features] float32, which add up to the product. The
        kernels in kernels.norm, which add a residual anyway, add them too
    before: if given, x has gates in its first half and ups in its second, [tokens, 2 * in_features]: what is multiplied
        is act(gate) * up. With several tokens and a weight in FP8, the launch that rounds them applies it
    """
    is_rounded = isinstance(weight, Fp8Weight) and len(x) > 1
    if before is not None and not is_rounded:
        x = gate_mul(x, before)
    if isinstance(weight, (InOrderWeight, WeightInParts, Fp8InOrderWeight)):
        return weight.product(x, bias, activation)
    if isinstance(weight, PackedWeight):
        out = weight.product(x, bias)
    elif _is_one_row(x):
        return one_row_linear(x, weight, bias, activation)
    elif isinstance(weight, Fp8Weight):
        in_fp8 = fp8_gate_mul_triton(x, before) if is_rounded and before is not None else quantize(x)
        out = fp8_linear(in_fp8, weight, bias, may_split and activation is None)
    elif wave := find_one_wave(x, weight, activation is not None, may_split):
        return one_wave_linear(x, weight, wave, bias, activation)
    else:
        out = F.linear(x, weight, bias)
    return gate_mul(out, activation) if activation else out


def norm_linear(
    x: Tensor,
    residual: Tensor | None,
    norm: Norm | None,
    weight: AnyWeight,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    post: Norm | None = None,
    lane: VectorLane | None = None,
) -> tuple[Tensor, Tensor]:
    """Return linear(rms_norm(total, norm), weight, bias, activation) and total = x + residual.

    The norm's stream_scale, if there is one, multiplies the total.

    x: [tokens, in_features], or with a residual also pieces that add up to it
    residual: [tokens, in_features]; None: the total is x
    norm: None: the total itself is multiplied
    post: if given, the total is rms_norm(x, post) + residual; needs a residual
    lane: if given, x stands for the sum of all ranks' x; only where takes_lane(x)
    """
    assert post is None or residual is not None
    if isinstance(weight, (Tensor, Fp8Weight)) and _is_one_row(x):
        return one_row_norm_linear(x, residual, norm, weight, bias, activation, post, lane)
    assert lane is None
    if isinstance(weight, Fp8Weight) and norm is not None:
        in_fp8, total = fp8_norm_triton(x, residual, norm, post)
        out = fp8_linear(in_fp8, weight, bias)
        return gate_mul(out, activation) if activation else out, total
    normed, total = _norm(x, residual, norm, post)
    return linear(normed, weight, bias, activation), total


def norm_and_linear(
    x: Tensor,
    residual: Tensor | None,
    norm: Norm | None,
    weight: Tensor | InOrderWeight,
    post: Norm | None = None,
    lane: VectorLane | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return norm_linear's product, or pieces of it; the product's input, rms_norm(total, norm); and the total.

    weight: of x's dtype or of float32, in which the product is computed then
    """
    if isinstance(weight, Tensor) and _is_one_row(x):
        normed = torch.empty_like(x)
        out, total = one_row_norm_linear(x, residual, norm, weight, bias, post=post, lane=lane, normed=normed)
        return out, normed, total
    assert lane is None
    normed, total = _norm(x, residual, norm, post)
    return linear(normed.to(weight.dtype), weight, bias, may_split=True), normed, total


def _norm(x: Tensor, residual: Tensor | None, norm: Norm | None, post: Norm | None) -> tuple[Tensor, Tensor]:
    """Return the input of norm_linear's product, and the total; makes one launch at most."""
    if residual is None:
        return x if norm is None else rms_norm(x, norm), x
    if norm is None:
        total = add_residual(x, residual, post)
        return total, total
    return add_rms_norm(x, residual, norm) if post is None else norm_add_rms_norm(x, residual, post, norm)


def takes_lane(x: Tensor) -> bool:
    """Return whether norm_linear can add up the ranks' parts of x, [tokens, in_features]."""
    return _is_one_row(x) and x.shape[1] <= MAX_LANE_FEATURES


def _is_one_row(x: Tensor) -> bool:
    return x.is_cuda and len(x) == 1 and x.shape[1] <= MAX_IN_FEATURES
