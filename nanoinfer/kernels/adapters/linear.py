"""Matrix products of rows that may have adapters: kernels.linear.dispatch's, and b a x added where it must be.

A single row takes no launch more. More rows take two more, and an activation's launch fewer: one
that runs beside the product, or if that is cuBLAS's before it, and one behind it. A weight of any format keeps its own
kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanoinfer.kernels.adapters.one_row import RowAdapter
from nanoinfer.kernels.adapters.pairs import AdapterRows, Pairs
from nanoinfer.kernels.adapters.products import expand, expand_reference, pieces_for, shrink
from nanoinfer.kernels.fp8 import Fp8Weight
from nanoinfer.kernels.groups import GroupWeight
from nanoinfer.kernels.linear.activation import Activation, AnyActivation, Ungated, activate, gate_mul
from nanoinfer.kernels.linear.cpu.in_parts import WeightInParts
from nanoinfer.kernels.linear.dispatch import AnyWeight, linear
from nanoinfer.kernels.linear.groups.row import has_row_kernel
from nanoinfer.kernels.linear.one_row import OneRowWeight, is_one_row, one_row_linear, one_row_norm_linear
from nanoinfer.kernels.linear.one_wave import find_one_wave
from nanoinfer.kernels.linear.operands.weight import add_and_norm
from nanoinfer.kernels.norm.norm import Norm


def adapted_linear(
    x: Tensor,
    weight: AnyWeight,
    pairs: Pairs,
    rows: AdapterRows,
    bias: Tensor | None = None,
    activation: AnyActivation | None = None,
    may_split: bool = False,
    before: Activation | None = None,
) -> Tensor:
    """Compute kernels.linear.dispatch.linear, with each row's adapter added before the activation.

    pairs: those beside the weight, [out_features, in_features]; x's rows are `rows`
    """
    if before is not None:
        x = gate_mul(x, before)
    if (row_weight := _for_one_row(x, weight)) is not None:
        return one_row_linear(x, row_weight, bias, activation, RowAdapter.of(pairs, rows))
    if isinstance(activation, Ungated):
        return activate(adapted_linear(x, weight, pairs, rows, bias), activation.function)
    if isinstance(weight, WeightInParts):
        zeros = x.new_zeros(len(x), sum(weight.sizes), dtype=torch.float32)
        added = expand_reference(shrink(x, pairs, rows), pairs, rows, zeros, cut=weight.sizes)
        return weight.product(x, bias, activation, added=added)
    may_split = may_split and activation is None
    if isinstance(weight, Tensor) and _is_for_cublas(x, weight, may_split):
        h = shrink(x, pairs, rows)
        y = linear(x, weight, bias)
    else:
        room = pieces_for(x, pairs, rows)
        y = linear(x, weight, bias, may_split=may_split)
        h = shrink(x, pairs, rows, room)
    out = expand(h, pairs, rows, y if y.dim() == 2 else y[0], activation)
    return y if activation is None else out


def _is_for_cublas(x: Tensor, weight: Tensor, may_split: bool) -> bool:
    """Return whether linear leaves the product to cuBLAS, beside which nothing runs."""
    return x.is_cuda and find_one_wave(x, weight, may_split=may_split) is None


def adapted_norm_linear(
    x: Tensor,
    residual: Tensor | None,
    norm: Norm | None,
    weight: AnyWeight,
    pairs: Pairs,
    rows: AdapterRows,
    bias: Tensor | None = None,
    activation: AnyActivation | None = None,
    post: Norm | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute kernels.linear.dispatch.norm_linear without a lane, with each row's adapter added before the activation.

    pairs, rows: as for adapted_linear
    """
    if (row_weight := _for_one_row(x, weight)) is not None:
        of_row = RowAdapter.of(pairs, rows)
        return one_row_norm_linear(x, residual, norm, row_weight, bias, activation, post, of_row=of_row)
    normed, total = add_and_norm(x, residual, norm, post)
    return adapted_linear(normed, weight, pairs, rows, bias, activation), total


def _for_one_row(x: Tensor, weight: object) -> OneRowWeight | None:
    """Return the weight if linear.one_row's kernel multiplies x by it, with its sums in any order; else None."""
    if not is_one_row(x):
        return None
    if isinstance(weight, GroupWeight):
        return weight if has_row_kernel(weight) else None
    return weight if isinstance(weight, (Tensor, Fp8Weight)) else None
