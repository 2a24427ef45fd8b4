"""The product of a single token's vector and a weight, with the norm before it, as fast as the weight can be read.

A separate launch for the norm of one token costs as much as a small product. So each program here adds and normalises
the whole input for itself, while its first loads of the weight are on their way. For the same reason each program adds
up the ranks' parts of the input for itself. A row's adapter takes no launch either: see kernels.adapters.one_row.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.adapters.one_row import RowAdapter, load_a, load_b, multiply_and_add, publish_h, receive_h
from nanoinfer.kernels.fp8 import Fp8Weight, parts_of
from nanoinfer.kernels.groups import GroupWeight
from nanoinfer.kernels.launch import (
    fetch_rows,
    launch_options,
    load_complete,
    num_multiprocessors,
    wait_for_predecessor,
)
from nanoinfer.kernels.linear.activation import Activation, gate_mul_block, gated_row
from nanoinfer.kernels.linear.fp8_row import load_scales, multiply_tile, prepare_row
from nanoinfer.kernels.linear.groups.row import choose_group_programs, load_of_groups, multiply_words, prepare_places
from nanoinfer.kernels.linear.groups.scales import readable
from nanoinfer.kernels.norm.rms_norm import Norm, norm_block
from nanoinfer.kernels.ranks.send_receive import VectorLane, add_ranks

OneRowWeight: TypeAlias = Tensor | Fp8Weight | GroupWeight
MAX_IN_FEATURES = 16384  # the longest input that one program's registers hold beside two tiles of the weight
MIN_TILE = 8192  # numbers of the weight per load of a program; at least two of its rows, or reductions cost more
REGISTERS = 2048  # of a thread, if its warp had all of a multiprocessor's
LOAD = 16  # bytes that a thread loads at once
WPER_WORD_PER_SM = 4 * MIN_TILE  # numbers of the weight that are on their way at a time
SHORT_ROW = 2048  # numbers of 16 bits: up to here, half as many warps wait less for each other (measured on an H200)


def is_one_row(x: Tensor) -> bool:
    """Return whether these kernels multiply x, [tokens, in_features]."""
    return x.is_cuda and len(x) == 1 and x.shape[1] <= MAX_IN_FEATURES


def one_row_linear(
    x: Tensor,
    weight: OneRowWeight,
    bias: Tensor | None = None,
    activation: Activation | None = None,
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
    activation: Activation | None = None,
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
    x: Tensor, experts: Tensor, weight: Tensor | Fp8Weight, bias: Tensor | None, activation: Activation
) -> Tensor:
    """Compute act(gate) * up of some experts for x of [1, in_features], in one launch; [experts, size].

    experts: int32, which the launch before may write; weight: [all experts, 2 * size, in_features]
    """
    return _launch(x, weight, bias, activation, experts=experts)


def _launch(
    x: Tensor,
    weight: OneRowWeight,
    bias: Tensor | None,
    activation: Activation | None,
    residual: Tensor | None = None,
    total: Tensor | None = None,
    norm: Norm | None = None,
    post: Norm | None = None,
    lane: VectorLane | None = None,
    normed: Tensor | None = None,
    of_row: RowAdapter | None = None,
    experts: Tensor | None = None,
) -> Tensor:
    assert of_row is None or lane is None
    count = 1 if experts is None else experts.numel()
    ranks = len(lane.inboxes) if lane else 1
    of_groups = weight if isinstance(weight, GroupWeight) else None
    numbers, scales, (height, width) = (
        (weight.words, readable(weight.scales), (None, None)) if isinstance(weight, GroupWeight) else parts_of(weight)
    )
    weight_rows, in_features = numbers.shape[-2], x.shape[1]
    assert x.is_contiguous()
    assert numbers.is_contiguous()
    dtype = torch.float32 if numbers.dtype == torch.float32 else x.dtype
    out = torch.empty((count, weight_rows // 2 if activation else weight_rows), dtype=dtype, device=x.device)
    block_k = triton.next_power_of_2(in_features)
    block_n, per_multiprocessor, warps = (
        choose_group_programs(block_k, of_groups) if of_groups else choose_programs(block_k, scales is not None)
    )
    is_plain = isinstance(weight, Tensor) and weight.itemsize == 2
    if is_plain and block_k <= SHORT_ROW and of_row is None and lane is None and experts is None:
        warps //= 2
    most = max(per_multiprocessor * num_multiprocessors(x.device) // count, 1)
    programs = min(triton.cdiv(weight_rows, block_n), most)
    per_load = LOAD // numbers.itemsize if isinstance(weight, Tensor) else None
    _one_row_kernel[(programs, count)](
        x,
        post.weight if post else None,
        residual,
        norm.weight if norm else None,
        norm.stream_scale if norm else None,
        numbers,
        scales,
        of_groups.zeros if of_groups else None,
        of_groups.factors if of_groups else None,
        bias,
        out,
        total,
        normed,
        lane.inboxes if lane else None,
        lane.stale if lane else None,
        lane.stop if lane else None,
        of_row.pairs.a if of_row else None,
        of_row.pairs.b if of_row else None,
        of_row.h if of_row else None,
        of_row.slot if of_row else None,
        experts,
        in_features,
        weight_rows,
        post.eps if post else None,
        norm.eps if norm else None,
        *_strides(of_groups),
        STALE=lane is not None and lane.stale is not None,
        RANK=lane.rank if lane else 0,
        RANKS=ranks,
        RANKS_BLOCK=triton.next_power_of_2(ranks),
        POST=post is not None,
        POST_PLUS_ONE=post is not None and post.plus_one,
        ADD=residual is not None,
        NORM=norm is not None,
        SCALED=norm is not None and norm.stream_scale is not None,
        PLUS_ONE=norm is not None and norm.plus_one,
        KEEP=normed is not None,
        BIAS=bias is not None,
        ACTIVATION=activation,
        HEIGHT=height,
        WIDTH=width,
        IN_WORDS=height is not None and x.is_cuda,
        NUMBERS=of_groups.numbers if of_groups else None,
        GROUP=of_groups.group if of_groups else None,
        NATIVE=x.is_cuda,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=warps,
        **(of_row.constants(programs, block_k, 32 * warps, per_load) if of_row else {}),
        # With an adapter, programs take more registers than those without, which all run at once.
        maxnreg=REGISTERS // (per_multiprocessor * warps)
        if of_row and scales is None and dtype.itemsize == 2
        else None,
        **launch_options(x),
    )
    return out


def _strides(weight: GroupWeight | None) -> tuple[int | None, ...]:
    """Return the strides of the scales and of the zeros, of rows and of groups."""
    if weight is None:
        return (None,) * 4
    return (*weight.scales.stride(), *((None, None) if weight.zeros is None else weight.zeros.stride()))


def choose_programs(block_k: int, in_fp8: bool) -> tuple[int, int, int]:
    """Return the rows of a tile, the programs for each multiprocessor, and the warps of a program."""
    if in_fp8:  # half the bytes; and fewer warps wait for each other
        tile = max(2 * MIN_TILE, 2 * block_k)
        return tile // block_k, 2 * WPER_WORD_PER_SM // tile, 4 if tile == 2 * MIN_TILE else 8
    tile = max(MIN_TILE, 2 * block_k)
    return tile // block_k, max(WPER_WORD_PER_SM // tile, 1), 8 if tile == MIN_TILE else 16


@triton.jit
def _one_row_kernel(
    x_ptr,
    post_weight_ptr,
    residual_ptr,
    norm_weight_ptr,
    stream_scale_ptr,
    weight_ptr,
    scales_ptr,
    zeros_ptr,
    factors_ptr,
    bias_ptr,
    out_ptr,
    total_ptr,
    normed_ptr,
    inboxes_ptr,
    stale_ptr,
    stop_ptr,
    a_ptr,
    b_ptr,
    h_ptr,
    slot_ptr,
    experts_ptr,
    in_features,
    weight_rows,
    post_eps,
    eps,
    scales_row,
    scales_group,
    zeros_row,
    zeros_group,
    STALE: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    RANKS_BLOCK: tl.constexpr,
    POST: tl.constexpr,
    POST_PLUS_ONE: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    KEEP: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    IN_WORDS: tl.constexpr,
    NUMBERS: tl.constexpr,
    GROUP: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
    PARTS: tl.constexpr = None,
    RANK_OF_B: tl.constexpr = None,
    PUBLISHERS: tl.constexpr = None,
    COLUMNS_BLOCK: tl.constexpr = None,
    PER_LOAD: tl.constexpr = None,
):
    GATED: tl.constexpr = ACTIVATION is not None
    IN_FP8: tl.constexpr = HEIGHT is not None
    IN_GROUPS: tl.constexpr = NUMBERS is not None
    ZEROS: tl.constexpr = zeros_ptr is not None
    # Numbers that a thread loads and multiplies at once
    PER_WORD: tl.constexpr = 4 if NUMBERS == "int8" else 8 if IN_WORDS or IN_GROUPS else 1
    if IN_WORDS:
        weight_ptr = weight_ptr.to(tl.pointer_type(tl.int64))
    program, programs = tl.program_id(0), tl.num_programs(0)
    if experts_ptr is not None:  # which the predecessor has chosen
        wait_for_predecessor(EARLY)
        expert = tl.load(experts_ptr + tl.program_id(1)).to(tl.int64)
        out_ptr += tl.program_id(1) * (weight_rows // 2 if GATED else weight_rows)
        weight_ptr += expert * weight_rows * (in_features // PER_WORD)
        if IN_FP8:
            scales_ptr += expert * (weight_rows // HEIGHT) * (in_features // WIDTH)
        if BIAS:
            bias_ptr += expert * weight_rows
    k = tl.arange(0, BLOCK_K)
    inside = k < in_features
    # The predecessor writes no weights, so the first loads of them need not wait for it.
    word, row_words = tl.arange(0, BLOCK_K // PER_WORD), in_features // PER_WORD
    if IN_GROUPS:
        row_words = tl.multiple_of(row_words, 4)
    ADAPTED: tl.constexpr = b_ptr is not None
    first = program
    if ADAPTED:
        first = programs - 1 - program  # so that those with the fewest tiles compute h
    tile = load_tile(weight_ptr, first, word, row_words, weight_rows, BLOCK_N, GATED)
    scales = None
    if IN_FP8:
        scales = load_scales(scales_ptr, first, in_features, weight_rows, HEIGHT, WIDTH, BLOCK_N, BLOCK_K, GATED)
    if IN_GROUPS:
        GROUPS: tl.constexpr = BLOCK_K // GROUP if GROUP < BLOCK_K else 1
        groups = in_features // GROUP
        scales = load_of_groups(
            scales_ptr, scales_row, scales_group, first, groups, weight_rows, BLOCK_N, GROUPS, GATED
        )
        zeros = None
        if ZEROS:
            zeros = load_of_groups(
                zeros_ptr, zeros_row, zeros_group, first, groups, weight_rows, BLOCK_N, GROUPS, GATED
            )
    if BIAS:
        bias = load_bias(bias_ptr, first, weight_rows, BLOCK_N, GATED)
    if POST:
        post_weight = tl.load(post_weight_ptr + k, mask=inside, other=0.0)
    if NORM:
        norm_weight = tl.load(norm_weight_ptr + k, mask=inside, other=0.0)
    if ADAPTED:
        slot, columns = load_complete(slot_ptr), len(PARTS) * RANK_OF_B
        a = load_a(a_ptr, slot, program, columns, in_features, k)
        b = load_b(b_ptr, slot, first, weight_rows, BLOCK_N, PARTS, RANK_OF_B, COLUMNS_BLOCK, GATED)
    if experts_ptr is None:
        wait_for_predecessor(EARLY)
    if ADAPTED:
        # The memory stays busy while programs wait for h.
        fetch_tile(weight_ptr, first + programs, row_words, weight_rows, BLOCK_N, BLOCK_K // PER_WORD, GATED, EARLY)

    x = tl.load(x_ptr + k, mask=inside, other=0.0)
    if RANKS > 1:
        x = add_ranks(
            x, k, inside, in_features, program, inboxes_ptr, stale_ptr, stop_ptr, STALE, RANK, RANKS, RANKS_BLOCK
        )
    if POST:
        x = norm_block(x, post_weight, in_features, post_eps, POST_PLUS_ONE)
    if ADD:
        x += tl.load(residual_ptr + k, mask=inside, other=0.0)
        if SCALED:
            x *= tl.load(stream_scale_ptr)
    if ADD or RANKS > 1:
        tl.store(total_ptr + k, x, mask=k < tl.where(program == 0, in_features, 0))
    if NORM:
        x = norm_block(x, norm_weight, in_features, eps, PLUS_ONE)
    if KEEP:
        tl.store(normed_ptr + k, x, mask=k < tl.where(program == 0, in_features, 0))
    if ADAPTED:
        publish_h(x, a, a_ptr, slot, h_ptr, program, columns, in_features, k, PUBLISHERS)
    if IN_GROUPS:
        places, sums = prepare_places(x, BLOCK_K, GROUPS, NUMBERS, ZEROS)
    else:
        x, factor = prepare_row(x, BLOCK_K, IN_WORDS)

    if ADAPTED:
        h = receive_h(h_ptr, slot, columns, b.dtype, COLUMNS_BLOCK).to(tl.float32)
    for start in range(first * BLOCK_N, weight_rows, programs * BLOCK_N):
        next_tile = start // BLOCK_N + programs
        following = load_tile(weight_ptr, next_tile, word, row_words, weight_rows, BLOCK_N, GATED)
        if ADAPTED:
            of_adapter = b.to(tl.float32) * h[None, :]
        if IN_GROUPS:
            dots = multiply_words(
                tile, places, sums, scales, zeros, NUMBERS, BLOCK_N, GROUPS, GROUP == 2 * PER_WORD, NATIVE
            )
            scales = load_of_groups(
                scales_ptr, scales_row, scales_group, next_tile, groups, weight_rows, BLOCK_N, GROUPS, GATED
            )
            if ZEROS:
                zeros = load_of_groups(
                    zeros_ptr, zeros_row, zeros_group, next_tile, groups, weight_rows, BLOCK_N, GROUPS, GATED
                )
            if factors_ptr is not None:
                dots *= load_bias(factors_ptr, start // BLOCK_N, weight_rows, BLOCK_N, GATED)
        elif PER_LOAD is not None:
            dots = multiply_and_add(tile, x, of_adapter, BLOCK_N, BLOCK_K, PER_LOAD)
        else:
            dots = multiply_tile(tile, x, factor, scales, BLOCK_N, BLOCK_K, IN_FP8, IN_WORDS)
        if IN_FP8:
            scales = load_scales(
                scales_ptr, next_tile, in_features, weight_rows, HEIGHT, WIDTH, BLOCK_N, BLOCK_K, GATED
            )
        if BIAS:
            dots += bias
            bias = load_bias(bias_ptr, next_tile, weight_rows, BLOCK_N, GATED)
        if ADAPTED:
            if PER_LOAD is None:
                dots += tl.sum(of_adapter, axis=1)
            b = load_b(b_ptr, slot, next_tile, weight_rows, BLOCK_N, PARTS, RANK_OF_B, COLUMNS_BLOCK, GATED)
        store_dots(dots.to(out_ptr.dtype.element_ty), out_ptr, start, weight_rows, ACTIVATION, BLOCK_N)
        tile = following


@triton.jit
def load_tile(weight_ptr, tile, k, in_features, weight_rows, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """Load BLOCK_N rows of the weight. If GATED, each gate's row precedes its up's; the weight has all gates first."""
    n = tile.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (n < weight_rows)[:, None] & (k < in_features)[None, :]
    if GATED:
        n = gated_row(n, weight_rows)
    return tl.load(weight_ptr + n[:, None] * in_features + k[None, :], mask=mask, other=0.0)


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
    """Let the L2 cache fetch what load_tile loads."""
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


@triton.jit
def load_bias(bias_ptr, tile, weight_rows, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """Load the biases of a tile's rows, in the tile's order, as float32."""
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = n < weight_rows
    if GATED:
        n = gated_row(n, weight_rows)
    return tl.load(bias_ptr + n, mask=mask, other=0.0).to(tl.float32)
