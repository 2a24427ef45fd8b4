"""The product of a single token's vector and a weight, with the norm before it, as fast as the weight can be read.

A separate launch for the norm of one token costs as much as a small product. So each program here adds and normalises
the whole input for itself, while its first loads of the weight are on their way. For the same reason each program adds
up the ranks' parts of the input for itself. A row's adapter takes no launch either: see kernels.adapters.one_row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.adapters.one_row import (
    RowAdapter,
    RowAdapterShape,
    load_a,
    load_b,
    multiply_and_add,
    publish_h,
    receive_h,
)
from nanoinfer.kernels.fp8 import Fp8Weight
from nanoinfer.kernels.groups import GroupWeight
from nanoinfer.kernels.launch import (
    cdiv,
    fetch_rows,
    launch_options,
    load_complete,
    next_power_of_2,
    num_multiprocessors,
    wait_for_predecessor,
)
from nanoinfer.kernels.linear.activation import (
    Activation,
    AnyActivation,
    Function,
    activate_block,
    gate_mul,
    gate_mul_block,
    gated_row,
    split_activation,
)
from nanoinfer.kernels.linear.fp8.row import fp8_row
from nanoinfer.kernels.linear.groups.row import group_row
from nanoinfer.kernels.linear.operands.operand import RowOperand
from nanoinfer.kernels.linear.operands.plain import load_bias, plain_row
from nanoinfer.kernels.norm.norm import Form, Norm, load_norm, norm_block
from nanoinfer.kernels.ranks.send_receive import VectorLane, add_ranks


class SideBySide(NamedTuple):
    """Weights of one input, whose outputs lie side by side. Each takes a launch of its own."""

    weights: tuple[OneRowWeight, ...]


OneRowWeight: TypeAlias = Tensor | Fp8Weight | GroupWeight | RowOperand | SideBySide
MAX_IN_FEATURES = 16384  # the longest input that one program's registers hold beside two tiles of the weight
REGISTERS = 2048  # of a thread, if its warp had all of a multiprocessor's
SHORT_ROW = 2048  # numbers of 16 bits: up to here, half as many warps wait less for each other (measured on an H200)


def is_one_row(x: Tensor) -> bool:
    """Return whether these kernels multiply x, [tokens, in_features]."""
    return x.is_cuda and len(x) == 1 and x.shape[1] <= MAX_IN_FEATURES


def one_row_linear(
    x: Tensor,
    weight: OneRowWeight,
    bias: Tensor | None = None,
    activation: AnyActivation | None = None,
    of_row: RowAdapter | None = None,
) -> Tensor:
    """Compute kernels.linear.dispatch.linear for x of [1, in_features], in one launch.

    of_row: the row's adapter, which is added before the activation
    """
    return _launch(x, weight, bias, activation, of_row=of_row)


def one_row_norm_linear(
    x: Tensor,
    residual: Tensor | None,
    norm: Norm | None,
    weight: OneRowWeight,
    bias: Tensor | None = None,
    activation: AnyActivation | None = None,
    post: Norm | None = None,
    lane: VectorLane | None = None,
    normed: Tensor | None = None,
    of_row: RowAdapter | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute kernels.linear.dispatch.norm_linear for x of [1, in_features], not pieces, in one launch.

    normed: [1, in_features], filled with the product's input if given
    of_row: as for one_row_linear; without a lane
    """
    total = x if residual is None and lane is None else torch.empty_like(x)
    return _launch(x, weight, bias, activation, residual, total, norm, post, lane, normed, of_row), total


def one_row_gates_and_ups(
    x: Tensor, experts: Tensor, weight: Tensor | Fp8Weight, bias: Tensor | None, activation: AnyActivation
) -> Tensor:
    """Compute act(gate) * up of some experts for x of [1, in_features], in one launch; [experts, size].

    experts: int32, which the launch before may write
    weight: [all experts, 2 * size, in_features]; of Ungated, [all experts, size, in_features], for act(up)
    """
    return _launch(x, weight, bias, activation, experts=experts)


def _launch(
    x: Tensor,
    weight: OneRowWeight,
    bias: Tensor | None,
    activation: AnyActivation | None,
    residual: Tensor | None = None,
    total: Tensor | None = None,
    norm: Norm | None = None,
    post: Norm | None = None,
    lane: VectorLane | None = None,
    normed: Tensor | None = None,
    of_row: RowAdapter | None = None,
    experts: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """out: is filled and returned; None: a new tensor is"""
    if isinstance(weight, SideBySide):
        assert not any(part is not None for part in (lane, normed, of_row, experts))
        return _launch_each(x, weight, bias, activation, residual, total, norm, post)
    assert of_row is None or lane is None
    assert x.is_contiguous()
    count = 1 if experts is None else experts.numel()
    operand = row_operand(weight, x.dtype)
    weight_rows, in_features, numbers = operand.rows, operand.in_features, operand.parts.numbers
    dtype = torch.float32 if numbers.dtype == torch.float32 else x.dtype
    gates, after = split_activation(activation)
    if out is None:
        out = torch.empty((count, weight_rows // 2 if gates else weight_rows), dtype=dtype, device=x.device)
    block_k = next_power_of_2(in_features)
    block_n, per_multiprocessor, warps = operand.programs
    is_plain = operand.load_scales is None and numbers.itemsize == 2
    if is_plain and block_k <= SHORT_ROW and of_row is None and lane is None and experts is None:
        warps //= 2
    most = max(per_multiprocessor * num_multiprocessors(x.device) // count, 1)
    programs = min(cdiv(weight_rows, block_n), most)
    _one_row_kernel[(programs, count)](
        Prologue(
            x,
            residual,
            norm.weight if norm else None,
            norm.bias if norm else None,
            norm.stream_scale if norm else None,
            post.weight if post else None,
            post.bias if post else None,
            total,
            normed,
            norm.eps if norm else None,
            post.eps if post else None,
        ),
        (lane.inboxes, lane.stale, lane.stop) if lane else None,
        (of_row.pairs.a, of_row.pairs.b, of_row.h, of_row.slot) if of_row else None,
        operand.parts,
        bias,
        experts,
        out,
        in_features,
        weight_rows,
        numbers.shape[-1],
        LOAD=operand.load,
        LOAD_SCALES=operand.load_scales,
        PREPARE=operand.prepare,
        MULTIPLY=operand.multiply,
        HOW=RowConstants(
            block_n,
            block_k,
            operand.form,
            gates,
            after,
            norm.form if norm else None,
            post.form if post else None,
            (lane.rank, len(lane.inboxes), lane.stale is not None) if lane else None,
            of_row.shape(programs, block_k, 32 * warps, operand.per_load, in_features // numbers.shape[-1])
            if of_row
            else None,
        ),
        num_warps=warps,
        # With an adapter, programs take more registers than those without, which all run at once.
        maxnreg=REGISTERS // (per_multiprocessor * warps) if of_row and is_plain else None,
        **launch_options(x),
    )
    return out


def _launch_each(
    x: Tensor,
    side_by_side: SideBySide,
    bias: Tensor | None,
    activation: AnyActivation | None,
    residual: Tensor | None,
    total: Tensor | None,
    norm: Norm | None,
    post: Norm | None,
) -> Tensor:
    """Launch for each weight; all of them write the same total. A weight may have gates, and another their ups."""
    gates, _ = split_activation(activation)
    operands = [row_operand(weight, x.dtype) for weight in side_by_side.weights]
    sizes = [operand.rows for operand in operands]
    out = torch.empty((1, sum(sizes)), dtype=x.dtype, device=x.device)
    biases = [None] * len(sizes) if bias is None else bias.split(sizes)
    for operand, own, some in zip(operands, biases, out.split(sizes, dim=1), strict=True):
        _launch(x, operand, own, None if gates else activation, residual, total, norm, post, out=some)
    return out if gates is None else gate_mul(out, gates)


def row_operand(weight: OneRowWeight, dtype: torch.dtype) -> RowOperand:
    """Return the operand of a weight, or of experts' weights. dtype: of the token's vector"""
    assert not isinstance(weight, SideBySide)
    if isinstance(weight, RowOperand):
        return weight
    if isinstance(weight, GroupWeight):
        return group_row(weight, dtype)
    return fp8_row(weight) if isinstance(weight, Fp8Weight) else plain_row(weight)


class Prologue(NamedTuple):
    """What comes before the product, in tensors of a row's features; None: nothing. total, normed: are filled"""

    x: Tensor
    residual: Tensor | None
    norm: Tensor | None
    norm_bias: Tensor | None
    stream_scale: Tensor | None
    post: Tensor | None
    post_bias: Tensor | None
    total: Tensor | None
    normed: Tensor | None
    eps: float | None
    post_eps: float | None


@dataclass(frozen=True)
class RowConstants:
    """What the kernel is compiled for. block_n, block_k: rows of a tile, and room for the inputs

    form: RowOperand's
    activation: of gates, which multiply ups; after: of all products
    lane: the rank, how many there are, and whether a lane has stale numbers; None: x is the sum
    adapter: None: the row has no room for one
    """

    block_n: int
    block_k: int
    form: Any
    activation: Activation | None
    after: Function | None
    norm: Form | None
    post: Form | None
    lane: tuple[int, int, bool] | None
    adapter: RowAdapterShape | None


@triton.jit
def _one_row_kernel(
    prologue,
    lane,
    adapter,
    parts,
    bias_ptr,
    experts_ptr,
    out_ptr,
    in_features,
    weight_rows,
    row_numbers,
    LOAD: tl.constexpr,
    LOAD_SCALES: tl.constexpr,
    PREPARE: tl.constexpr,
    MULTIPLY: tl.constexpr,
    HOW: tl.constexpr,
    EARLY: tl.constexpr,
):
    N: tl.constexpr = HOW.block_n
    K: tl.constexpr = HOW.block_k
    ACTIVATION: tl.constexpr = HOW.activation
    AFTER: tl.constexpr = HOW.after
    GATED: tl.constexpr = ACTIVATION is not None
    ADAPTER: tl.constexpr = HOW.adapter
    NORM: tl.constexpr = HOW.norm
    POST: tl.constexpr = HOW.post
    ADAPTED: tl.constexpr = ADAPTER is not None
    program, programs, first_row = tl.program_id(0), tl.num_programs(0), tl.full([], 0, tl.int64)
    if experts_ptr is not None:  # which the predecessor has chosen
        wait_for_predecessor(EARLY)
        first_row = tl.load(experts_ptr + tl.program_id(1)).to(tl.int64) * weight_rows
        out_ptr += tl.program_id(1) * (weight_rows // 2 if GATED else weight_rows)
    k = tl.arange(0, K)
    inside = k < in_features
    first = program
    if ADAPTED:
        first = programs - 1 - program  # so that those with the fewest tiles compute h
    # The predecessor writes no weights, so the first loads of them need not wait for it.
    tile = LOAD(parts, first_row, first, in_features, weight_rows, HOW)
    scales = None
    if LOAD_SCALES is not None:
        scales = LOAD_SCALES(parts, first_row, first, in_features, weight_rows, HOW)
    if bias_ptr is not None:
        bias = load_bias(bias_ptr + first_row, first, weight_rows, N, GATED)
    if prologue.post is not None:
        post_weight, post_bias = load_norm(prologue.post, prologue.post_bias, k, inside)
    if prologue.norm is not None:
        norm_weight, norm_bias = load_norm(prologue.norm, prologue.norm_bias, k, inside)
    if ADAPTED:
        PARTS: tl.constexpr = ADAPTER.parts
        COLUMNS: tl.constexpr = ADAPTER.columns_block
        a_ptr, b_ptr, h_ptr, slot_ptr = adapter
        slot, columns = load_complete(slot_ptr), len(PARTS) * ADAPTER.rank
        a = load_a(a_ptr, slot, program, columns, in_features, k)
        b = load_b(b_ptr, slot, first, weight_rows, N, PARTS, ADAPTER.rank, COLUMNS, GATED)
    if experts_ptr is None:
        wait_for_predecessor(EARLY)
    if ADAPTED:
        # The memory stays busy while programs wait for h.
        PER_NUMBER: tl.constexpr = ADAPTER.per_number
        fetch_tile(parts.numbers, first + programs, row_numbers, weight_rows, N, K // PER_NUMBER, GATED, EARLY)

    x = tl.load(prologue.x + k, mask=inside, other=0.0)
    if HOW.lane is not None:
        RANK: tl.constexpr = HOW.lane[0]
        RANKS: tl.constexpr = HOW.lane[1]
        STALE: tl.constexpr = HOW.lane[2]
        inboxes_ptr, stale_ptr, stop_ptr = lane
        BLOCK: tl.constexpr = triton.next_power_of_2(RANKS)
        x = add_ranks(x, k, inside, in_features, program, inboxes_ptr, stale_ptr, stop_ptr, STALE, RANK, RANKS, BLOCK)
    if prologue.post is not None:
        x = norm_block(x, post_weight, post_bias, in_features, prologue.post_eps, POST)
    if prologue.residual is not None:
        x += tl.load(prologue.residual + k, mask=inside, other=0.0)
        if prologue.stream_scale is not None:
            x *= tl.load(prologue.stream_scale)
    if prologue.residual is not None or HOW.lane is not None:
        tl.store(prologue.total + k, x, mask=k < tl.where(program == 0, in_features, 0))
    if prologue.norm is not None:
        x = norm_block(x, norm_weight, norm_bias, in_features, prologue.eps, NORM)
    if prologue.normed is not None:
        tl.store(prologue.normed + k, x, mask=k < tl.where(program == 0, in_features, 0))
    if ADAPTED:
        publish_h(x, a, a_ptr, slot, h_ptr, program, columns, in_features, k, ADAPTER.publishers)
    vector = PREPARE(x, HOW)

    if ADAPTED:
        h = receive_h(h_ptr, slot, columns, b.dtype, COLUMNS).to(tl.float32)
    for start in range(first * N, weight_rows, programs * N):
        index = start // N
        following = LOAD(parts, first_row, index + programs, in_features, weight_rows, HOW)
        if ADAPTED:
            of_adapter = b.to(tl.float32) * h[None, :]
        if ADAPTED and ADAPTER.per_load is not None:
            dots = multiply_and_add(tile, vector, of_adapter, N, K, ADAPTER.per_load)
        else:
            dots = MULTIPLY(parts, tile, vector, scales, first_row, index, weight_rows, HOW)
        if LOAD_SCALES is not None:
            scales = LOAD_SCALES(parts, first_row, index + programs, in_features, weight_rows, HOW)
        if bias_ptr is not None:
            dots += bias
            bias = load_bias(bias_ptr + first_row, index + programs, weight_rows, N, GATED)
        if ADAPTED:
            if ADAPTER.per_load is None:
                dots += tl.sum(of_adapter, axis=1)
            b = load_b(b_ptr, slot, index + programs, weight_rows, N, PARTS, ADAPTER.rank, COLUMNS, GATED)
        if AFTER is not None:
            dots = activate_block(dots.to(out_ptr.dtype.element_ty).to(tl.float32), AFTER)
        store_dots(dots.to(out_ptr.dtype.element_ty), out_ptr, start, weight_rows, ACTIVATION, N)
        tile = following


@triton.jit
def fetch_tile(
    weight_ptr,
    tile,
    in_features,
    weight_rows,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Let the L2 cache fetch the rows of a tile."""
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if GATED:
        n = gated_row(n, weight_rows)
    fetch_rows(weight_ptr, n, weight_rows, in_features, 0, BLOCK_K, EARLY)


@triton.jit
def store_dots(dots, out_ptr, start, weight_rows, ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store the products of the rows that load_tile loaded, from row `start` on; with an activation, a gated pair's."""
    if ACTIVATION is not None:
        n = start // 2 + tl.arange(0, BLOCK_N // 2)
        gate, up = tl.split(tl.reshape(dots, [BLOCK_N // 2, 2]))
        tl.store(out_ptr + n, gate_mul_block(gate, up, ACTIVATION), mask=n < weight_rows // 2)
    else:
        n = start + tl.arange(0, BLOCK_N)
        tl.store(out_ptr + n, dots, mask=n < weight_rows)
