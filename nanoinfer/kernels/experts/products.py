"""The products of tokens with the experts that they use: gate and up, the activation, down, and the weighted sum.

The choices of all tokens are sorted by expert, and cut into tiles of choices of one expert. A program multiplies one
tile with some rows of its expert's weight. The launch has programs for as many tiles as any routing of so many tokens
needs: the last ones find no tile and end. So the host needs not know the routing, and a graph can hold the launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.adapters.experts import ExpertAdapters, add_added
from nanoinfer.kernels.adapters.linear import adapted_linear
from nanoinfer.kernels.experts.add_pieces import add_pieces
from nanoinfer.kernels.experts.group_tiles import multiply_group_tiles
from nanoinfer.kernels.experts.one_group_row import one_group_row_expert_mlps
from nanoinfer.kernels.experts.one_row import is_one_row, one_row_expert_mlps
from nanoinfer.kernels.experts.operand import ExpertWeights, group_linear, shape_of
from nanoinfer.kernels.experts.route import Routes
from nanoinfer.kernels.fp8 import BLOCK as FP8_BLOCK
from nanoinfer.kernels.fp8 import Fp8Tokens, Fp8Weight, parts_of, quantize
from nanoinfer.kernels.groups import GroupWeight
from nanoinfer.kernels.launch import early_launch, num_multiprocessors, shared_memory, wait_for_predecessor
from nanoinfer.kernels.linear.activation import Activation, gate_mul_block
from nanoinfer.kernels.linear.dispatch import linear
from nanoinfer.kernels.linear.fp8_linear import multiply_block
from nanoinfer.kernels.linear.in_parts import WeightInParts
from nanoinfer.kernels.linear.one_wave import add_product
from nanoinfer.kernels.sorting import Groups, group_triton

MOST_WIDE = 32  # choices in a tile of float32: no tensor core multiplies it, and more choices fill all registers

Gather = Callable[[Tensor], Tensor]


def expert_mlps(
    x: Tensor,
    routes: Routes,
    gate_up: ExpertWeights | Sequence[WeightInParts],
    down: ExpertWeights | Sequence[WeightInParts],
    activation: Activation,
    may_split: bool = False,
    in_order: bool = False,
    gather: Gather | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    """Add up, for each token, the weighted results of its experts, in the order in which its router ranks them.

    x: [tokens, hidden_size]
    gate_up: [experts, 2 * size, hidden_size], an expert's gates before its ups
    down: [experts, hidden_size, size]; on the CPU each of the weights may also be cut into parts
    may_split: the result may also be several pieces that the kernels in kernels.norm add up, [used, tokens,
        hidden_size]: the weighted results of the tokens' likeliest experts, of their second ones, and so on
    in_order: a token's result has the same bits with any number of tokens. On a GPU only
    gather: puts the shares of several ranks side by side, [rows, share] to [rows, ranks * share]. Each rank then has a
        share of the gates and ups, and down of [experts, hidden_size / ranks, size]. Every rank gets the whole result
    gate_up_bias, down_bias: [experts, 2 * size] and [experts, hidden_size], or down's outputs of this rank; None: the
        products have no bias, or another rank adds it
    adapters: if given, the tokens' are added to both products
    An expert computes down @ (act(gate @ x) * (up @ x)), and adds its biases. Returns [tokens, hidden_size].
    Weights in FP8 are such that kernels.linear.fp8_linear.can_multiply_fp8. With them, the kernels round several tokens
    to FP8 too, and their results of the activation; if in_order, also a single token's. The groups of a GroupWeight are
    such that operand.can_multiply_groups; its tensors are contiguous.
    """
    if x.is_cuda:
        assert isinstance(gate_up, (Tensor, Fp8Weight, GroupWeight))
        assert isinstance(down, (Tensor, Fp8Weight, GroupWeight))
        how = may_split, in_order, gather
        return expert_mlps_triton(x, routes, gate_up, down, activation, *how, gate_up_bias, down_bias, adapters)
    assert not isinstance(gate_up, Fp8Weight)
    assert not isinstance(down, Fp8Weight)
    return expert_mlps_reference(x, routes, gate_up, down, activation, gather, gate_up_bias, down_bias, adapters)


def expert_mlps_reference(
    x: Tensor,
    routes: Routes,
    gate_up: Tensor | GroupWeight | Sequence[WeightInParts],
    down: Tensor | GroupWeight | Sequence[WeightInParts],
    activation: Activation,
    gather: Gather | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    """expert_mlps in torch: the host goes over the experts that any token uses."""
    tokens, used = routes.experts.shape
    flat = routes.experts.flatten()
    order, counts = flat.argsort(stable=True), flat.bincount().tolist()
    groups = [(expert, choices // used) for expert, choices in enumerate(order.split(counts)) if len(choices)]

    def multiply(rows: Tensor, i: int, tokens: Tensor, first: bool) -> Tensor:
        weights, biases = (gate_up, gate_up_bias) if first else (down, down_bias)
        weight = group_linear(weights, i) if isinstance(weights, GroupWeight) else weights[i]
        how = None if biases is None else biases[i], activation if first else None
        if adapters is None:
            return linear(rows, weight, *how)
        own = adapters.of_expert(adapters.gate_up if first else adapters.down, i, tokens)
        return adapted_linear(rows, weight, *own, *how)

    gated = torch.cat([multiply(x[tokens], i, tokens, True) for i, tokens in groups])
    inputs = (gated if gather is None else gather(gated)).split([len(tokens) for _, tokens in groups])
    products = torch.cat([multiply(rows, *group, False) for rows, group in zip(inputs, groups, strict=True)])
    del gated, inputs  # of a long prompt they are large
    products = products if gather is None else gather(products)
    results = torch.empty_like(products)
    results[order] = products
    del products
    return (results.view(tokens, used, -1).float() * routes.weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)


def expert_mlps_triton(
    x: Tensor,
    routes: Routes,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    activation: Activation,
    may_split: bool = False,
    in_order: bool = False,
    gather: Gather | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    """expert_mlps as four launches and, unless `may_split`, a fifth for the sum; for one token two, unless `in_order`.

    With weights in FP8, each product of several tokens, or `in_order`, has a launch more, which rounds its input. With
    adapters there are eight more, also for one token.
    `gather` comes behind the first product, and at the end.
    """
    count, outputs, size = shape_of(down)
    in_fp8 = isinstance(down, Fp8Weight)
    if not in_order and adapters is None and is_one_row(x, routes, size):
        if isinstance(gate_up, GroupWeight) and isinstance(down, GroupWeight):
            return one_group_row_expert_mlps(x, routes, gate_up, down, activation, gate_up_bias, down_bias)
        assert not isinstance(gate_up, GroupWeight)
        assert not isinstance(down, GroupWeight)
        return one_row_expert_mlps(x, routes, gate_up, down, activation, gate_up_bias, down_bias)
    tokens, used = routes.experts.shape
    block_m = choices_in_a_tile(tokens * used, count)
    if x.is_cuda and x.itemsize == 4:
        block_m = min(block_m, MOST_WIDE)
    choices = None if adapters is None else adapters.sort(routes.experts)
    groups = group_triton(routes.experts, count, block_m)
    if choices is not None:  # each expert's are where they were
        groups = Groups(choices.rows.groups.choices, groups.tiles)
    added = None if choices is None else choices.beside_gate_up(x)
    gated = x.new_empty(tokens * used, shape_of(gate_up)[1] // 2)
    vectors = quantize(x) if in_fp8 else x
    _multiply(vectors, gate_up, gate_up_bias, added, gated, groups, block_m, routes, activation, in_order)
    if gather is not None:
        gated = gather(gated)
    results = x.new_empty(used, tokens, outputs)
    flat = results.view(used * tokens, outputs)
    added = None if choices is None else choices.beside_down(gated)
    vectors = quantize(gated) if in_fp8 else gated
    _multiply(vectors, down, down_bias, added, flat, groups, block_m, routes, None, in_order)
    if used == 1:
        result = results[0]
    elif may_split and tokens > 1:
        return results
    else:
        result = add_pieces(results)
    return result if gather is None else gather(result)


def choices_in_a_tile(choices: int, count: int) -> int:
    """Return the size of tiles with which one of `count` experts, if its use is average, has one tile, or full ones."""
    average = choices / count
    return 16 if average <= 8 else 32 if average <= 24 else 64 if average <= 96 else 128


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
    def of(cls, block_m: int, gated: bool, in_fp8: bool) -> Tiling:
        """Return the fastest."""
        if in_fp8:  # block_k numbers share a scale; the products of a block fill registers of their own
            is_large = block_m == 128
            block_n = 128 if is_large and not gated else 64
            stages = 4 if is_large else 3 if gated else 5  # so that three of the small programs share a multiprocessor
            return cls(block_m, block_n, FP8_BLOCK.value, 8 if is_large else 4, stages, persistent=is_large)
        if block_m == 128:
            return cls(block_m, 128 if gated else 256, 64, warps=8, stages=3, persistent=True)
        block_k, stages = (128, 3) if block_m == 16 else (64, 5)
        return cls(block_m, 64, block_k, warps=4, stages=stages, persistent=False)


def _multiply(
    x: Tensor | Fp8Tokens,
    weight: ExpertWeights,
    bias: Tensor | None,
    added: Tensor | None,
    out: Tensor,
    groups: Groups,
    block_m: int,
    routes: Routes,
    activation: Activation | None,
    in_order: bool,
) -> None:
    """Multiply each choice's input with its expert's weight, [experts, out_features, in_features].

    bias: [experts, out_features]
    added: [choices, out_features], to each choice's product
    activation: given for the first product, which reads x of the choices' tokens and writes in the order of `groups`;
        None for the second, which reads that, applies the choices' weights, and writes what expert_mlps' pieces are
    in_order: a product and a sum are never rounded once together, which tiles of one size alone might do
    """
    if isinstance(weight, GroupWeight):
        assert isinstance(x, Tensor)
        multiply_group_tiles(x, weight, bias, added, out, groups, block_m, routes, activation, in_order)
        return
    numbers, scales, (height, width) = parts_of(weight)
    vectors, x_scales = (x.numbers, x.scales) if isinstance(x, Fp8Tokens) else (x, None)
    (tokens, used), in_features, out_features = routes.experts.shape, numbers.shape[2], out.shape[1]
    assert vectors.is_contiguous()
    assert numbers.is_contiguous()
    gated = activation is not None
    tiling = Tiling.of(block_m, gated, scales is not None)
    stage = (tiling.block_m + tiling.block_n * (2 if gated else 1)) * (tiling.block_k * numbers.itemsize + 4)
    items = triton.cdiv(out_features, tiling.block_n) * len(groups.tiles)
    programs = min(items, num_multiprocessors(out.device)) if tiling.persistent else items
    _expert_kernel[(programs,)](
        vectors,
        x_scales,
        numbers,
        scales,
        bias,
        added,
        out,
        routes.weights,
        *groups,
        tokens,
        len(vectors),
        out_features,
        in_features,
        items,
        USED=used,
        HEIGHT=height,
        WIDTH=width,
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
    bias_ptr,
    added_ptr,
    out_ptr,
    choice_weights_ptr,
    choices_ptr,
    tiles_ptr,
    tokens,
    room,
    out_features,
    in_features,
    items,
    USED: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    GATED: tl.constexpr = ACTIVATION is not None
    IN_FP8: tl.constexpr = HEIGHT is not None
    OTHER: tl.constexpr = None if EVEN else 0.0
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
            k = tl.arange(0, BLOCK_K)
            has_output = n < out_features
            weight_rows = out_features * 2 if GATED else out_features
            x_ptrs = x_ptr + source.to(tl.int64)[:, None] * in_features + k[None, :]
            weight_ptrs = weight_ptr + (expert.to(tl.int64) * weight_rows + n[:, None]) * in_features + k[None, :]
            if BIAS:
                biases_ptr = bias_ptr + expert * weight_rows + n
                bias = tl.load(biases_ptr, mask=has_output, other=0.0).to(tl.float32)
                if GATED:
                    up_bias = tl.load(biases_ptr + out_features, mask=has_output, other=0.0).to(tl.float32)

            # Tensor cores need at least 64 rows in the left matrix: with fewer choices, the weight is the left one.
            TOKENS_LEFT: tl.constexpr = BLOCK_M >= 64
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
                    row = expert * weight_rows + n
                    column_ptr = scales_ptr + start // WIDTH
                    scale = tl.load(column_ptr + row // HEIGHT * (in_features // WIDTH), mask=has_output, other=0.0)
                    acc += multiply_block(x, x_scale, weight, scale, TOKENS_LEFT)
                    if GATED:
                        up_row = row + out_features
                        up_scale_ptrs = column_ptr + up_row // HEIGHT * (in_features // WIDTH)
                        up_scale = tl.load(up_scale_ptrs, mask=has_output, other=0.0)
                        up_acc += multiply_block(x, x_scale, up_weight, up_scale, TOKENS_LEFT)
                else:
                    acc = add_product(acc, x, weight, TOKENS_LEFT)
                    if GATED:
                        up_acc = add_product(up_acc, x, up_weight, TOKENS_LEFT)

            if BIAS:
                acc += bias[None, :] if TOKENS_LEFT else bias[:, None]
                if GATED:
                    up_acc += up_bias[None, :] if TOKENS_LEFT else up_bias[:, None]
            if added_ptr is not None:
                acc = add_added(acc, added_ptr, choice, exists, n, has_output, weight_rows, TOKENS_LEFT)
                if GATED:
                    up = n + out_features
                    up_acc = add_added(up_acc, added_ptr, choice, exists, up, has_output, weight_rows, TOKENS_LEFT)
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
