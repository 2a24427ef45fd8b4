"""The products of tiles of choices with the rows of their experts' weights, in one launch.

A program multiplies one tile with some rows of its expert's weight. The launch has programs for as many tiles as any
routing of so many tokens needs: the last ones find no tile and end.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.experts.group_tiles import multiply_groups
from nanoinfer.kernels.experts.operand import ExpertWeights, Operand
from nanoinfer.kernels.experts.route import Groups, Routes
from nanoinfer.kernels.fp8 import BLOCK as FP8_BLOCK
from nanoinfer.kernels.fp8 import Fp8Tokens
from nanoinfer.kernels.launch import early_launch, num_multiprocessors, shared_memory, wait_for_predecessor
from nanoinfer.kernels.linear.activation import Activation, gate_mul_block
from nanoinfer.kernels.linear.fp8_linear import multiply_block
from nanoinfer.kernels.linear.one_wave import add_product


@dataclass(frozen=True)
class Tiling:
    """How a product is cut. The numbers were measured on an H200, with 128 experts of 768.

    block_m: choices in a tile
    block_n: outputs that are multiplied at once; in a gated product as many gates and as many ups
    block_k: inputs that a program reads at a time
    stages: such reads that are on their way at once, if the shared memory holds them
    persistent: there are as many programs as multiprocessors, and each goes over many tiles
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    persistent: bool

    @classmethod
    def of(cls, block_m: int, gated: bool, operand: Operand) -> Tiling:
        """Return the fastest."""
        if operand.group is not None:
            return cls._of_groups(block_m, gated, operand)
        if operand.scales is not None:  # block_k numbers share a scale; a block's products fill registers of their own
            is_large = block_m == 128
            block_n = 128 if is_large and not gated else 64
            stages = 4 if is_large else 3 if gated else 5  # so that three of the small programs share a multiprocessor
            return cls(block_m, block_n, FP8_BLOCK.value, 8 if is_large else 4, stages, persistent=is_large)
        if block_m == 128:
            return cls(block_m, 128 if gated else 256, 64, warps=8, stages=3, persistent=True)
        block_k, stages = (128, 3) if block_m == 16 else (64, 5)
        return cls(block_m, 64, block_k, warps=4, stages=stages, persistent=False)

    @classmethod
    def _of_groups(cls, block_m: int, gated: bool, operand: Operand) -> Tiling:
        """Return the fastest with a GroupWeight."""
        # The rows are such that each warp has sixteen, and thus all of what it multiplies.
        block_n, block_k = 64 if gated else 128, operand.inputs_at_once(128)
        if block_m == 128:
            return cls(block_m, block_n, block_k, warps=block_n // 16, stages=3, persistent=True)
        return cls(block_m, block_n, block_k, warps=block_n // 16, stages=4, persistent=False)


def multiply_tiles(
    x: Tensor | Fp8Tokens,
    weight: ExpertWeights,
    bias: Tensor | None,
    out: Tensor,
    groups: Groups,
    block_m: int,
    routes: Routes,
    activation: Activation | None,
    in_order: bool,
) -> None:
    """Multiply each choice's input with its expert's weight, [experts, out_features, in_features].

    bias: [experts, out_features]
    activation: given for the first product, which reads x of the choices' tokens and writes in the order of `groups`;
        None for the second, which reads that, applies the choices' weights, and writes what expert_mlps' pieces are
    in_order: a product and a sum are never rounded once together, which tiles of one size alone might do
    """
    operand = Operand.of(weight, out.dtype)
    vectors, x_scales = (x.numbers, x.scales) if isinstance(x, Fp8Tokens) else (x, None)
    (tokens, used), (*_, in_features), out_features = routes.experts.shape, operand.shape, out.shape[1]
    assert vectors.is_contiguous()
    gated = activation is not None
    tiling = Tiling.of(block_m, gated, operand)
    rows = tiling.block_n * (2 if gated else 1)
    stage = tiling.block_k * (tiling.block_m * vectors.itemsize + rows * operand.bits // 8) + 4 * (
        tiling.block_m + rows
    )
    items = triton.cdiv(out_features, tiling.block_n) * len(groups.tiles)
    programs = min(items, num_multiprocessors(out.device)) if tiling.persistent else items
    _expert_kernel[(programs,)](
        vectors,
        x_scales,
        operand.data,
        operand.scales,
        operand.zeros,
        operand.factors,
        bias,
        out,
        routes.weights,
        *groups,
        tokens,
        len(vectors),
        out_features,
        in_features,
        operand.quads,
        items,
        USED=used,
        HEIGHT=operand.block[0],
        WIDTH=operand.block[1],
        NUMBERS=operand.numbers,
        GROUP=operand.group,
        EXACT=operand.scales_are_exact,
        PAIRED=operand.scales_are_paired,
        NATIVE=out.is_cuda and out.itemsize == 2,
        BIAS=bias is not None,
        ACTIVATION=activation,
        EVEN=in_features % tiling.block_k == out_features % tiling.block_n == 0,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        num_warps=tiling.warps,
        num_stages=max(1, min(tiling.stages, shared_memory(out.device) // stage)),
        enable_fp_fusion=not in_order,
        **early_launch(out),
    )


@triton.jit(do_not_specialize=["tokens", "room", "items"])
def _expert_kernel(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    scales_ptr,
    zeros_ptr,
    factors_ptr,
    bias_ptr,
    out_ptr,
    choice_weights_ptr,
    choices_ptr,
    tiles_ptr,
    tokens,
    room,
    out_features,
    in_features,
    quads,
    items,
    USED: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    NUMBERS: tl.constexpr,
    GROUP: tl.constexpr,
    EXACT: tl.constexpr,
    PAIRED: tl.constexpr,
    NATIVE: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    GATED: tl.constexpr = ACTIVATION is not None
    wait_for_predecessor(EARLY)
    blocks = tl.cdiv(out_features, BLOCK_N)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        tile_ptr = tiles_ptr + item // blocks * 3
        expert, first, end = tl.load(tile_ptr), tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)
        if first < end:
            position = first + tl.arange(0, BLOCK_M)
            exists = position < end
            choice = tl.load(choices_ptr + position, mask=exists, other=0)
            source = choice // USED if GATED else position
            target = position if GATED else choice % USED * tokens + choice // USED
            n = item % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
            has_output = n < out_features
            weight_rows = out_features * 2 if GATED else out_features
            row = expert.to(tl.int64) * weight_rows + n
            if factors_ptr is not None:
                factors = tl.load(factors_ptr + row, mask=has_output, other=0.0)
                if GATED:
                    up_factors = tl.load(factors_ptr + row + out_features, mask=has_output, other=0.0)
            if BIAS:
                biases_ptr = bias_ptr + expert * weight_rows + n
                bias = tl.load(biases_ptr, mask=has_output, other=0.0).to(tl.float32)
                if GATED:
                    up_bias = tl.load(biases_ptr + out_features, mask=has_output, other=0.0).to(tl.float32)

            # Tensor cores need at least 64 rows in the left matrix: with fewer choices, the weight is the left one.
            TOKENS_LEFT: tl.constexpr = BLOCK_M >= 64 and NUMBERS is None
            x_ptrs = x_ptr + source.to(tl.int64)[:, None] * in_features
            if NUMBERS is None:
                acc, up_acc = _multiply_rows(
                    x_ptrs,
                    x_scales_ptr,
                    exists,
                    source,
                    room,
                    weight_ptr,
                    scales_ptr,
                    row,
                    has_output,
                    out_features,
                    in_features,
                    HEIGHT,
                    WIDTH,
                    GATED,
                    EVEN,
                    TOKENS_LEFT,
                    BLOCK_K,
                )
            else:
                acc, up_acc = multiply_groups(
                    x_ptrs,
                    exists,
                    weight_ptr,
                    scales_ptr,
                    zeros_ptr,
                    row,
                    has_output,
                    out_features,
                    in_features,
                    quads,
                    NUMBERS,
                    GROUP,
                    EXACT,
                    PAIRED,
                    GATED,
                    EVEN,
                    NATIVE,
                    BLOCK_K,
                )

            if factors_ptr is not None:
                acc *= factors[:, None]
                if GATED:
                    up_acc *= up_factors[:, None]
            if BIAS:
                acc += bias[None, :] if TOKENS_LEFT else bias[:, None]
                if GATED:
                    up_acc += up_bias[None, :] if TOKENS_LEFT else up_bias[:, None]
            if not GATED:
                choice_weights = tl.load(choice_weights_ptr + choice, mask=exists, other=0.0)
                acc *= choice_weights[:, None] if TOKENS_LEFT else choice_weights[None, :]
            out = acc.to(out_ptr.dtype.element_ty)
            if GATED:
                out = gate_mul_block(out, up_acc.to(out.dtype), ACTIVATION)
            if not TOKENS_LEFT:
                out = tl.trans(out)
            targets = out_ptr + target.to(tl.int64)[:, None] * out_features + n[None, :]
            tl.store(targets, out, mask=exists[:, None] & has_output[None, :])


@triton.jit
def _multiply_rows(
    x_ptrs,
    x_scales_ptr,
    exists,
    source,
    room,
    weight_ptr,
    scales_ptr,
    row,
    has_output,
    out_features,
    in_features,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    TOKENS_LEFT: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Do as multiply_groups, with weights of 16 bits or FP8; if TOKENS_LEFT, return [vectors, rows]."""
    IN_FP8: tl.constexpr = HEIGHT is not None
    OTHER: tl.constexpr = None if EVEN else 0.0
    BLOCK_M: tl.constexpr = exists.shape[0]
    BLOCK_N: tl.constexpr = row.shape[0]
    k = tl.arange(0, BLOCK_K)
    x_ptrs += k[None, :]
    weight_ptrs = weight_ptr + row[:, None] * in_features + k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N] if TOKENS_LEFT else [BLOCK_N, BLOCK_M], tl.float32)
    up_acc = tl.zeros([BLOCK_M, BLOCK_N] if TOKENS_LEFT else [BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, in_features, BLOCK_K):
        inside = (k < in_features - start)[None, :]
        x_mask = exists[:, None] if EVEN else exists[:, None] & inside
        weight_mask = None if EVEN else has_output[:, None] & inside
        x = tl.load(x_ptrs + start, mask=x_mask, other=0.0)
        weight = tl.load(weight_ptrs + start, mask=weight_mask, other=OTHER)
        if GATED:
            up_ptrs = weight_ptrs + start + out_features * in_features
            up_weight = tl.load(up_ptrs, mask=weight_mask, other=OTHER)
        if IN_FP8:
            x_scale = tl.load(x_scales_ptr + start // BLOCK_K * room + source, mask=exists, other=0.0)
            short_row = row.to(tl.int32)
            column_ptr = scales_ptr + start // WIDTH
            scale_ptrs = column_ptr + short_row // HEIGHT * (in_features // WIDTH)
            scale = tl.load(scale_ptrs, mask=has_output, other=0.0)
            acc += multiply_block(x, x_scale, weight, scale, TOKENS_LEFT)
            if GATED:
                up_scale_ptrs = column_ptr + (short_row + out_features) // HEIGHT * (in_features // WIDTH)
                up_scale = tl.load(up_scale_ptrs, mask=has_output, other=0.0)
                up_acc += multiply_block(x, x_scale, up_weight, up_scale, TOKENS_LEFT)
        else:
            acc = add_product(acc, x, weight, TOKENS_LEFT)
            if GATED:
                up_acc = add_product(up_acc, x, up_weight, TOKENS_LEFT)
    return acc, up_acc
