"""The products of a single token with experts of GroupWeights, in two launches, as one_row makes others.

One kernel serves both. The weights that a token's vector meets lie side by side: for the first product those of one
expert, and for the second those of all that the token uses.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.experts.group_row import multiply_words, prepare_places
from nanoinfer.kernels.experts.operand import GroupOperand, shape_of
from nanoinfer.kernels.experts.route import Routes
from nanoinfer.kernels.groups import GroupWeight
from nanoinfer.kernels.launch import early_launch, load_complete, num_multiprocessors, wait_for_predecessor
from nanoinfer.kernels.linear.activation import Activation, gated_row
from nanoinfer.kernels.linear.groups.scales import widen
from nanoinfer.kernels.linear.one_row import store_dots

TILE = 1 << 14  # bytes of the weight per load of a program; at least two of its rows


def one_group_row_expert_mlps(
    x: Tensor,
    routes: Routes,
    gate_up: GroupWeight,
    down: GroupWeight,
    activation: Activation,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """Compute products.expert_mlps for x of [1, hidden_size]; it rounds no single expert's result."""
    (_, hidden_size, size), used = shape_of(down), routes.experts.shape[1]
    gated, out = x.new_empty(used, size), x.new_empty(1, hidden_size)
    _launch(x, routes, gate_up, gate_up_bias, gated, activation)
    _launch(gated, routes, down, down_bias, out, None)
    return out


def _launch(
    x: Tensor, routes: Routes, weight: GroupWeight, bias: Tensor | None, out: Tensor, activation: Activation | None
) -> None:
    """Multiply x with each expert's gates and ups; or with an activation of None, add up what the experts' downs make.

    x, out: [1, inputs] and [used, outputs], or the other way around
    """
    operand = GroupOperand.of(weight, x.dtype)
    assert x.is_contiguous()
    count = len(out) if activation is not None else 1  # of products
    used = routes.experts.shape[1] // count  # experts side by side
    _, weight_rows, size = operand.shape
    block_k = triton.next_power_of_2(used * operand.quads * 128 // operand.bits)
    block_n, per_multiprocessor, warps = choose_programs(block_k * operand.bits // 8)
    programs = max(per_multiprocessor * num_multiprocessors(x.device) // count, 1)
    _group_row_kernel[(min(triton.cdiv(weight_rows, block_n), programs), count)](
        x,
        *routes,
        *weight[:4],
        bias,
        out,
        size,
        weight_rows,
        operand.quads,
        USED=used,
        BLOCK_USED=triton.next_power_of_2(used),
        ACTIVATION=activation,
        NUMBERS=weight.numbers,
        GROUP=weight.group,
        NATIVE=x.is_cuda and x.itemsize == 2,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=warps,
        **early_launch(x),
    )


def choose_programs(row: int) -> tuple[int, int, int]:
    """Return the rows of a tile, the programs for each multiprocessor, and the warps of a program; row: its bytes"""
    return max(TILE // row, 2), *((4, 4) if row <= TILE // 4 else (2, 8))


@triton.jit
def _group_row_kernel(
    x_ptr,
    experts_ptr,
    choice_weights_ptr,
    words_ptr,
    scales_ptr,
    zeros_ptr,
    factors_ptr,
    bias_ptr,
    out_ptr,
    size,
    weight_rows,
    quads,
    USED: tl.constexpr,
    BLOCK_USED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NUMBERS: tl.constexpr,
    GROUP: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    GATED: tl.constexpr = ACTIVATION is not None
    PER_WORD: tl.constexpr = 4 if NUMBERS == "int8" else 8
    HALVES: tl.constexpr = GROUP == 2 * PER_WORD
    UNIT: tl.constexpr = GROUP if HALVES else 4 * PER_WORD  # inputs that share a scale
    program, programs = tl.program_id(0), tl.num_programs(0)
    if GATED:  # the predecessor has chosen the experts
        wait_for_predecessor(EARLY)
        experts_ptr += tl.program_id(1)
        out_ptr += tl.program_id(1) * (weight_rows // 2)
    row_words, groups = quads * 4, size // GROUP
    padded = row_words * PER_WORD  # the inputs for which an expert's row has room

    word = tl.arange(0, BLOCK_K // PER_WORD)
    has_word = word < USED * row_words
    first_row = _first_rows(experts_ptr, word // row_words, weight_rows, USED)
    word_ptrs = words_ptr + tl.max_contiguous(tl.multiple_of(first_row * row_words + word % row_words, 4), 4)
    unit = tl.arange(0, BLOCK_K // UNIT) * UNIT
    has_unit = (unit < USED * padded) & (unit % padded < size)
    first_row = _first_rows(experts_ptr, unit // padded, weight_rows, USED)
    # The compiler sees no order in these. The hint, though not always true, makes a warp load along a row.
    group_places = tl.max_contiguous(first_row * groups + unit % padded // GROUP, 2)
    tile = _load_rows(word_ptrs, program, has_word, row_words, weight_rows, BLOCK_N, GATED)
    scales = _load_rows(scales_ptr + group_places, program, has_unit, groups, weight_rows, BLOCK_N, GATED)
    zeros = None
    if zeros_ptr is not None:
        zeros = _load_rows(zeros_ptr + group_places, program, has_unit, groups, weight_rows, BLOCK_N, GATED)
    if not GATED:
        wait_for_predecessor(EARLY)

    k = tl.arange(0, BLOCK_K)
    choice, within = k // padded, k % padded
    has_input = (choice < USED) & (within < size)
    x = tl.load(x_ptr + choice * size + within, mask=has_input, other=0.0).to(tl.float32)
    if not GATED:
        x *= load_complete(choice_weights_ptr + choice, has_input, 0.0)
    places, sums, factor = prepare_places(x, BLOCK_K, UNIT, NUMBERS, zeros_ptr is not None, NATIVE)
    factored = tl.zeros([1], tl.int32) if GATED else unit // padded  # choices that have other factors
    for start in range(program * BLOCK_N, weight_rows, programs * BLOCK_N):
        next_tile = start // BLOCK_N + programs
        this_tile = next_tile - programs
        following = _load_rows(word_ptrs, next_tile, has_word, row_words, weight_rows, BLOCK_N, GATED)
        wide = widen(scales)
        if factors_ptr is not None:
            factor_rows = _first_rows(experts_ptr, factored, weight_rows, USED)
            has_factor = factored < USED
            wide *= _load_rows(factors_ptr + factor_rows, this_tile, has_factor, 1, weight_rows, BLOCK_N, GATED)
        dots = multiply_words(tile, places, sums, wide, zeros, NUMBERS, HALVES, NATIVE) * factor
        scales = _load_rows(scales_ptr + group_places, next_tile, has_unit, groups, weight_rows, BLOCK_N, GATED)
        if zeros_ptr is not None:
            zeros = _load_rows(zeros_ptr + group_places, next_tile, has_unit, groups, weight_rows, BLOCK_N, GATED)
        if bias_ptr is not None:
            i = tl.arange(0, BLOCK_USED)
            bias_ptrs = bias_ptr + load_complete(experts_ptr + i, i < USED, 0) * weight_rows
            bias = _load_rows(bias_ptrs, this_tile, i < USED, 1, weight_rows, BLOCK_N, GATED).to(tl.float32)
            if not GATED:
                bias *= load_complete(choice_weights_ptr + i, i < USED, 0.0)[None, :]
            dots += tl.sum(bias, axis=1)
        store_dots(dots.to(out_ptr.dtype.element_ty), out_ptr, start, weight_rows, ACTIVATION, BLOCK_N)
        tile = following


@triton.jit
def _first_rows(experts_ptr, choice, weight_rows, USED: tl.constexpr):
    """Return the first row of each choice's expert among those of all experts, int64.

    A load for each choice would be in a layout of its own, and the addresses would have to be moved to another.
    """
    rows = tl.zeros(choice.shape, tl.int64)
    for i in tl.static_range(USED):
        rows = tl.where(choice == i, load_complete(experts_ptr + i).to(tl.int64) * weight_rows, rows)
    return rows


@triton.jit
def _load_rows(ptrs, tile, inside, stride, weight_rows, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """Load BLOCK_N rows, [BLOCK_N, columns]; if GATED, each gate's row precedes its up's. ptrs: those of row 0"""
    n = tile.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (n < weight_rows)[:, None] & inside[None, :]
    if GATED:
        n = gated_row(n, weight_rows)
    other: tl.constexpr = 0.0 if ptrs.dtype.element_ty.is_floating() else 0
    return tl.load(ptrs[None, :] + n[:, None] * stride, mask=mask, other=other)
