"""The products of a single token with experts of GroupWeights, in two launches, as one_row makes others.

One kernel serves both. The weights that a token's vector meets lie side by side: for the first product those of one
expert, and for the second those of all that the token uses.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.experts.group_row import multiply_words, prepare_places, size_of_places
from nanoinfer.kernels.experts.one_row import load_down_bias
from nanoinfer.kernels.experts.operand import can_multiply_groups, shape_of
from nanoinfer.kernels.experts.route import Routes
from nanoinfer.kernels.groups import BITS, GroupWeight
from nanoinfer.kernels.launch import (
    cdiv,
    launch_options,
    load_complete,
    next_power_of_2,
    num_multiprocessors,
    wait_for_predecessor,
)
from nanoinfer.kernels.linear.activation import AnyActivation, activate_block, gated_row, split_activation
from nanoinfer.kernels.linear.groups.scales import readable, widen
from nanoinfer.kernels.linear.one_row import store_dots
from nanoinfer.kernels.linear.operands.plain import load_bias
from nanoinfer.kernels.unpacking import bits_of

TILE = 1 << 14  # bytes of the weight per load of a program; at least two of its rows
WIDE = 3072  # bytes of a row; all warps add up such rows together, and wait for each other once a tile


def one_group_row_expert_mlps(
    x: Tensor,
    routes: Routes,
    gate_up: GroupWeight,
    down: GroupWeight,
    activation: AnyActivation,
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
    x: Tensor, routes: Routes, weight: GroupWeight, bias: Tensor | None, out: Tensor, activation: AnyActivation | None
) -> None:
    """Multiply x with each expert's gates and ups, or ups alone; or add up what the experts' downs make.

    x, out: [1, inputs] and [used, outputs], or the other way around
    activation: None: the weight is that of downs
    """
    assert can_multiply_groups(weight)
    assert all(part is None or part.is_contiguous() for part in (x, *weight[:4], weight.blocks))
    count = len(out) if activation is not None else 1  # of products
    used = routes.experts.shape[1] // count  # experts side by side
    (_, weight_rows, size), bits, quads = shape_of(weight), BITS[weight.numbers], weight.words.shape[2] // 4
    block_k, rest = cut(used * quads * 128 // bits)
    block_n, per_multiprocessor, warps = choose_programs((block_k + rest) * bits // 8, weight.group)
    gates, after = split_activation(activation)
    programs = max(per_multiprocessor * num_multiprocessors(x.device) // count, 1)
    _expert_row_kernel[(min(cdiv(weight_rows, block_n), programs), count)](
        x,
        *routes,
        weight.words,
        readable(weight.scales),
        weight.zeros,
        weight.factors,
        weight.blocks,
        bias,
        out,
        size,
        weight_rows,
        quads,
        USED=used,
        BLOCK_USED=next_power_of_2(used),
        ACTIVATION=gates,
        AFTER=after,
        NUMBERS=weight.numbers,
        GROUP=weight.group,
        PER_BLOCK=(weight.block or 0) // weight.group,
        NATIVE=x.is_cuda and x.itemsize == 2,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        REST=rest,
        num_warps=warps,
        **launch_options(x),
    )


def cut(inputs: int) -> tuple[int, int]:
    """Return two powers of two that have room for so many inputs; the second is 0 where one does nearly as well."""
    whole = next_power_of_2(inputs)
    return (whole, 0) if 4 * inputs > 3 * whole else (whole // 2, next_power_of_2(inputs - whole // 2))


def choose_programs(row: int, group: int) -> tuple[int, int, int]:
    """Return the rows of a tile, the programs for each multiprocessor, and the warps of a program.

    row: its bytes; group: the inputs that share a scale, which takes registers
    """
    tile, per_multiprocessor = (3 * TILE, 1) if row >= WIDE and group >= 32 else (TILE, 2)
    return 1 << max((tile // row).bit_length() - 1, 1), per_multiprocessor, 8


@triton.jit
def _expert_row_kernel(
    x_ptr,
    experts_ptr,
    choice_weights_ptr,
    words_ptr,
    scales_ptr,
    zeros_ptr,
    factors_ptr,
    blocks_ptr,
    bias_ptr,
    out_ptr,
    size,
    weight_rows,
    quads,
    USED: tl.constexpr,
    BLOCK_USED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    AFTER: tl.constexpr,
    NUMBERS: tl.constexpr,
    GROUP: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    REST: tl.constexpr,
    EARLY: tl.constexpr,
):
    GATED: tl.constexpr = ACTIVATION is not None
    FIRST: tl.constexpr = GATED or AFTER is not None  # of the two products
    PER_WORD: tl.constexpr = 32 // bits_of(NUMBERS)
    HALVES: tl.constexpr = GROUP == 2 * PER_WORD
    UNIT: tl.constexpr = GROUP if HALVES else 4 * PER_WORD  # inputs that share a scale
    program, programs = tl.program_id(0), tl.num_programs(0)
    if FIRST:  # the predecessor has chosen the experts
        wait_for_predecessor(EARLY)
        experts_ptr += tl.program_id(1)
        out_ptr += tl.program_id(1) * (weight_rows // 2 if GATED else weight_rows)
    row_words, groups = quads * 4, size // GROUP
    ZEROS: tl.constexpr = zeros_ptr is not None
    word_ptrs, has_word = _words_of(words_ptr, experts_ptr, row_words, weight_rows, 0, BLOCK_K // PER_WORD, USED)
    place, first_row, has_unit = _groups_of(
        experts_ptr, size, row_words * PER_WORD, weight_rows, 0, BLOCK_K, UNIT, GROUP, USED
    )
    tile = _load_rows(word_ptrs, program, has_word, row_words, weight_rows, BLOCK_N, GATED)
    scales = _load_rows(scales_ptr + place, program, has_unit, groups, weight_rows, BLOCK_N, GATED)
    zeros, rest_zeros, rest_sums = None, None, None
    if ZEROS:
        zeros = _load_rows(zeros_ptr + place, program, has_unit, groups, weight_rows, BLOCK_N, GATED)
    if REST > 0:
        rest_ptrs, has_rest = _words_of(
            words_ptr, experts_ptr, row_words, weight_rows, BLOCK_K // PER_WORD, REST // PER_WORD, USED
        )
        rest_place, rest_row, has_rest_unit = _groups_of(
            experts_ptr, size, row_words * PER_WORD, weight_rows, BLOCK_K, REST, UNIT, GROUP, USED
        )
        rest = _load_rows(rest_ptrs, program, has_rest, row_words, weight_rows, BLOCK_N, GATED)
        rest_scales = _load_rows(scales_ptr + rest_place, program, has_rest_unit, groups, weight_rows, BLOCK_N, GATED)
        if ZEROS:
            rest_zeros = _load_rows(zeros_ptr + rest_place, program, has_rest_unit, groups, weight_rows, BLOCK_N, GATED)
    if not FIRST:
        wait_for_predecessor(EARLY)

    x = _load_x(x_ptr, choice_weights_ptr, size, row_words * PER_WORD, 0, BLOCK_K, USED, not FIRST)
    largest = tl.max(tl.abs(x), axis=0)
    if REST > 0:
        rest_x = _load_x(x_ptr, choice_weights_ptr, size, row_words * PER_WORD, BLOCK_K, REST, USED, not FIRST)
        largest = tl.maximum(largest, tl.max(tl.abs(rest_x), axis=0))
        rest_places, rest_sums = prepare_places(rest_x, largest, REST, UNIT, NUMBERS, ZEROS, NATIVE)
    places, sums = prepare_places(x, largest, BLOCK_K, UNIT, NUMBERS, ZEROS, NATIVE)
    for start in range(program * BLOCK_N, weight_rows, programs * BLOCK_N):
        next_tile = start // BLOCK_N + programs
        this_tile = next_tile - programs
        following = _load_rows(word_ptrs, next_tile, has_word, row_words, weight_rows, BLOCK_N, GATED)
        wide = _with_factors(scales, factors_ptr, first_row, this_tile, has_unit, weight_rows, BLOCK_N, FIRST)
        of_blocks = None
        if PER_BLOCK > 0:
            of_blocks = _load_blocks(
                blocks_ptr, place, this_tile, has_unit, groups, weight_rows, ZEROS, PER_BLOCK, BLOCK_N, GATED
            )
        dots = multiply_words(tile, places, sums, wide, zeros, of_blocks, NUMBERS, HALVES, NATIVE)
        scales = _load_rows(scales_ptr + place, next_tile, has_unit, groups, weight_rows, BLOCK_N, GATED)
        if ZEROS:
            zeros = _load_rows(zeros_ptr + place, next_tile, has_unit, groups, weight_rows, BLOCK_N, GATED)
        tile = following
        if REST > 0:
            following = _load_rows(rest_ptrs, next_tile, has_rest, row_words, weight_rows, BLOCK_N, GATED)
            wide = _with_factors(
                rest_scales, factors_ptr, rest_row, this_tile, has_rest_unit, weight_rows, BLOCK_N, FIRST
            )
            if PER_BLOCK > 0:
                of_blocks = _load_blocks(
                    blocks_ptr,
                    rest_place,
                    this_tile,
                    has_rest_unit,
                    groups,
                    weight_rows,
                    ZEROS,
                    PER_BLOCK,
                    BLOCK_N,
                    GATED,
                )
            dots += multiply_words(rest, rest_places, rest_sums, wide, rest_zeros, of_blocks, NUMBERS, HALVES, NATIVE)
            rest_scales = _load_rows(
                scales_ptr + rest_place, next_tile, has_rest_unit, groups, weight_rows, BLOCK_N, GATED
            )
            if ZEROS:
                rest_zeros = _load_rows(
                    zeros_ptr + rest_place, next_tile, has_rest_unit, groups, weight_rows, BLOCK_N, GATED
                )
            rest = following
        dots *= size_of_places(largest, NUMBERS, NATIVE)
        if FIRST:
            own = load_complete(experts_ptr) * weight_rows
            if factors_ptr is not None:
                dots *= load_bias(factors_ptr + own, this_tile, weight_rows, BLOCK_N, GATED)
            if bias_ptr is not None:
                dots += load_bias(bias_ptr + own, this_tile, weight_rows, BLOCK_N, GATED)
        elif bias_ptr is not None:
            dots += load_down_bias(
                bias_ptr, this_tile, experts_ptr, choice_weights_ptr, weight_rows, USED, BLOCK_USED, BLOCK_N
            )
        if AFTER is not None:
            dots = activate_block(dots.to(out_ptr.dtype.element_ty).to(tl.float32), AFTER)
        store_dots(dots.to(out_ptr.dtype.element_ty), out_ptr, start, weight_rows, ACTIVATION, BLOCK_N)


@triton.jit
def _words_of(
    words_ptr, experts_ptr, row_words, weight_rows, FIRST: tl.constexpr, COUNT: tl.constexpr, USED: tl.constexpr
):
    """Return the pointers to words of the experts' first rows, side by side, [COUNT], and which of them are any."""
    word = FIRST + tl.arange(0, COUNT)
    first_row = _first_rows(experts_ptr, word // row_words, weight_rows, USED)
    place = tl.max_contiguous(tl.multiple_of(first_row * row_words + word % row_words, 4), 4)
    return words_ptr + place, word < USED * row_words


@triton.jit
def _groups_of(
    experts_ptr,
    size,
    padded,
    weight_rows,
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    GROUP: tl.constexpr,
    USED: tl.constexpr,
):
    """Return the places of what the groups of SIZE inputs have, their experts' first rows, and which groups are any.

    padded: the inputs for which an expert's row has room
    """
    unit = FIRST + tl.arange(0, SIZE // UNIT) * UNIT
    first_row = _first_rows(experts_ptr, unit // padded, weight_rows, USED)
    # The compiler sees no order in these. The hint, though not always true, makes a warp load along a row.
    place = tl.max_contiguous(first_row * (size // GROUP) + unit % padded // GROUP, 2)
    return place, first_row, (unit < USED * padded) & (unit % padded < size)


@triton.jit
def _load_x(
    x_ptr,
    choice_weights_ptr,
    size,
    padded,
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    USED: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """Load SIZE inputs of the experts, side by side, as float32; if WEIGHTED, times the choices' weights."""
    k = FIRST + tl.arange(0, SIZE)
    choice, within = k // padded, k % padded
    has_input = (choice < USED) & (within < size)
    x = tl.load(x_ptr + choice * size + within, mask=has_input, other=0.0).to(tl.float32)
    return x * load_complete(choice_weights_ptr + choice, has_input, 0.0) if WEIGHTED else x


@triton.jit
def _with_factors(
    scales, factors_ptr, first_row, tile, inside, weight_rows, BLOCK_N: tl.constexpr, FIRST: tl.constexpr
):
    """Return scales as float32; if not FIRST, with the factors, which differ from expert to expert."""
    if factors_ptr is None or FIRST:
        return widen(scales)
    else:
        return widen(scales) * _load_rows(factors_ptr + first_row, tile, inside, 1, weight_rows, BLOCK_N, False)


@triton.jit
def _load_blocks(
    blocks_ptr,
    place,
    tile,
    inside,
    groups,
    weight_rows,
    ZEROS: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GATED: tl.constexpr,
):
    """Load the factors of the groups' blocks, [BLOCK_N, groups], as scales.load_factors does."""
    ptrs = blocks_ptr.to(tl.pointer_type(tl.int32 if ZEROS else tl.int16)) + place // PER_BLOCK
    return _load_rows(ptrs, tile, inside, groups // PER_BLOCK, weight_rows, BLOCK_N, GATED)


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
