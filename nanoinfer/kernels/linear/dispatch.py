"""Matrix products, with the norm before and the activation after, by whichever kernel is fastest for the shape."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from nanoinfer.kernels.linear.activation import silu_mul
from nanoinfer.kernels.linear.one_row import MAX_IN_FEATURES, one_row_linear, one_row_norm_linear
from nanoinfer.kernels.linear.one_wave import find_one_wave, one_wave_linear
from nanoinfer.kernels.norm.rms_norm import add_rms_norm, rms_norm


def linear(x: Tensor, weight: Tensor, gated: bool = False, may_split: bool = False) -> Tensor:
    """x @ weight.T: [tokens, in_features] and [out_features, in_features] to [tokens, out_features].

    gated: the weight has gates in its first half; silu(gate) * up is returned, [tokens, out_features // 2]
    may_split: it may also be [pieces, tokens, out_features] float32, which add up to the product: who adds something
    to it anyhow, as kernels.norm does, can add those as well
    """
    if _is_one_row(x, weight):
        return one_row_linear(x, weight, gated)
    if wave := find_one_wave(x, weight, gated, may_split):
        return one_wave_linear(x, weight, wave, gated)
    out = F.linear(x, weight)
    return silu_mul(out) if gated else out


def norm_linear(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float, weight: Tensor, gated: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns linear(rms_norm(x + residual), weight, gated) and x + residual.

    x: [tokens, in_features], or with a residual pieces that add up to it; residual: [tokens, in_features]
    """
    if _is_one_row(x, weight):
        return one_row_norm_linear(x, residual, norm_weight, eps, weight, gated)
    if residual is None:
        normed, total = rms_norm(x, norm_weight, eps), x
    else:
        normed, total = add_rms_norm(x, residual, norm_weight, eps)
    return linear(normed, weight, gated), total


def _is_one_row(x: Tensor, weight: Tensor) -> bool:
    return x.is_cuda and len(x) == 1 and weight.shape[1] <= MAX_IN_FEATURES
