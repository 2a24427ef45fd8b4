"""The products of tokens with the experts that they use: gate and up, the activation, down, and the weighted sum.

The choices of all tokens are sorted by expert, and cut into tiles of choices of one expert. A program multiplies one
tile with some rows of its expert's weight. The launch has programs for as many tiles as any routing of so many tokens
needs: the last ones find no tile and end. So the host needs not know the routing, and a graph can hold the launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nanoinfer.kernels.adapters.experts import ExpertAdapters
from nanoinfer.kernels.adapters.linear import adapted_linear
from nanoinfer.kernels.add_pieces import add_pieces
from nanoinfer.kernels.experts.group_tiles import group_operand_and_config
from nanoinfer.kernels.experts.one_group_row import one_group_row_expert_mlps
from nanoinfer.kernels.experts.one_row import is_one_row, one_row_expert_mlps
from nanoinfer.kernels.experts.operand import ExpertWeights, group_linear, shape_of
from nanoinfer.kernels.experts.route import Routes
from nanoinfer.kernels.fp8 import BLOCK as FP8_BLOCK
from nanoinfer.kernels.fp8 import Fp8Tokens, Fp8Weight, quantize
from nanoinfer.kernels.groups import GroupWeight
from nanoinfer.kernels.linear.activation import AnyActivation, Ungated, rows_per_output
from nanoinfer.kernels.linear.cpu.in_parts import WeightInParts
from nanoinfer.kernels.linear.dispatch import linear
from nanoinfer.kernels.linear.fp8.linear import fp8_operand
from nanoinfer.kernels.linear.operands.plain import plain_operand
from nanoinfer.kernels.linear.tiles import Chosen, Epilogue, TileConfig, multiply_tiles, stages_that_fit
from nanoinfer.kernels.sorting import Groups, group_triton

MOST_WIDE = 32  # choices in a tile of float32: no tensor core multiplies it, and more choices fill all registers

Gather = Callable[[Tensor], Tensor]


def expert_mlps(
    x: Tensor,
    routes: Routes,
    gate_up: ExpertWeights | Sequence[WeightInParts],
    down: ExpertWeights | Sequence[WeightInParts],
    activation: AnyActivation,
    may_split: bool = False,
    in_order: bool = False,
    gather: Gather | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    adapters: ExpertAdapters | None = None,
    count: int | None = None,
) -> Tensor:
    """Add up, for each token, the weighted results of its experts, in the order in which its router ranks them.

    x: [tokens, hidden_size]
    gate_up: [experts, 2 * size, hidden_size], an expert's gates before its ups; of Ungated, the ups alone:
        [experts, size, hidden_size]
    down: [experts, hidden_size, size]; on the CPU each of the weights may also be cut into parts
    may_split: the result may also be several pieces that the kernels in kernels.norm add up, [used, tokens,
        hidden_size]: the weighted results of the tokens' likeliest experts, of their second ones, and so on
    in_order: a token's result has the same bits with any number of tokens. On a GPU only
    gather: puts the shares of several ranks side by side, [rows, share] to [rows, ranks * share]. Each rank then has a
        share of the gates and ups, and down of [experts, hidden_size / ranks, size]. Every rank gets the whole result
    gate_up_bias, down_bias: [experts, gate_up's rows] and [experts, hidden_size], or down's outputs of this rank; None:
        the products have no bias, or another rank adds it
    adapters: if given, the tokens' are added to both products
    count: choices from this number on are no experts, and add nothing: see identities.py; None: there are no such
    An expert computes down @ (act(gate @ x) * (up @ x)), or without gates down @ act(up @ x), and adds its biases.
    Returns [tokens, hidden_size].
    Weights in FP8 are such that kernels.linear.fp8.linear.can_multiply_fp8. With them, the kernels round several tokens
    to FP8 too, and their results of the activation; if in_order, also a single token's. The groups of a GroupWeight are
    such that operand.can_multiply_groups; its tensors are contiguous.
    """
    if x.is_cuda:
        assert isinstance(gate_up, (Tensor, Fp8Weight, GroupWeight))
        assert isinstance(down, (Tensor, Fp8Weight, GroupWeight))
        how = may_split, in_order, gather
        return expert_mlps_triton(x, routes, gate_up, down, activation, *how, gate_up_bias, down_bias, adapters, count)
    assert not isinstance(gate_up, Fp8Weight)
    assert not isinstance(down, Fp8Weight)
    return expert_mlps_reference(x, routes, gate_up, down, activation, gather, gate_up_bias, down_bias, adapters, count)


def expert_mlps_reference(
    x: Tensor,
    routes: Routes,
    gate_up: Tensor | GroupWeight | Sequence[WeightInParts],
    down: Tensor | GroupWeight | Sequence[WeightInParts],
    activation: AnyActivation,
    gather: Gather | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    adapters: ExpertAdapters | None = None,
    count: int | None = None,
) -> Tensor:
    """expert_mlps in torch: the host goes over the experts that any token uses."""
    tokens, used = routes.experts.shape
    flat = routes.experts.flatten()
    counts = flat.bincount().tolist()[:count]
    order = flat.argsort(stable=True)[: sum(counts)]
    if not len(order):
        return torch.zeros_like(x)
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
    results = products.new_zeros(len(flat), products.shape[1])
    results[order] = products
    del products
    return (results.view(tokens, used, -1).float() * routes.weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)


def expert_mlps_triton(
    x: Tensor,
    routes: Routes,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    activation: AnyActivation,
    may_split: bool = False,
    in_order: bool = False,
    gather: Gather | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    adapters: ExpertAdapters | None = None,
    count: int | None = None,
) -> Tensor:
    """expert_mlps as four launches and, unless `may_split`, a fifth for the sum; for one token two, unless `in_order`.

    With weights in FP8, each product of several tokens, or `in_order`, has a launch more, which rounds its input. With
    adapters there are eight more, also for one token.
    `gather` comes behind the first product, and at the end.
    """
    num_experts, outputs, size = shape_of(down)
    in_fp8 = isinstance(down, Fp8Weight)
    if not in_order and adapters is None and count is None and is_one_row(x, routes, size):
        if isinstance(gate_up, GroupWeight) and isinstance(down, GroupWeight):
            return one_group_row_expert_mlps(x, routes, gate_up, down, activation, gate_up_bias, down_bias)
        assert not isinstance(gate_up, GroupWeight)
        assert not isinstance(down, GroupWeight)
        return one_row_expert_mlps(x, routes, gate_up, down, activation, gate_up_bias, down_bias)
    tokens, used = routes.experts.shape
    block_m = choices_in_a_tile(tokens * used, num_experts)
    if x.is_cuda and x.itemsize == 4:
        block_m = min(block_m, MOST_WIDE)
    choices = None if adapters is None else adapters.sort(routes.experts)
    groups = group_triton(routes.experts, num_experts, block_m)
    if choices is not None:  # each expert's are where they were
        groups = Groups(choices.rows.groups.choices, groups.tiles)
    chosen = Chosen(groups, used)
    added = None if choices is None else choices.beside_gate_up(x)
    gated = x.new_empty(tokens * used, shape_of(gate_up)[1] // rows_per_output(activation))
    vectors = quantize(x) if in_fp8 else x
    epilogue = Epilogue(bias=gate_up_bias, added=added)
    _multiply(vectors, gate_up, epilogue, gated, chosen, block_m, activation, in_order)
    if gather is not None:
        gated = gather(gated)
    results = x.new_empty(used, tokens, outputs)
    added = None if choices is None else choices.beside_down(gated)
    vectors = quantize(gated) if in_fp8 else gated
    epilogue = Epilogue(bias=down_bias, added=added, shares=routes.weights)
    _multiply(vectors, down, epilogue, results, chosen, block_m, None, in_order)
    if count is not None:
        result = add_pieces(results, routes.experts, count)
    elif used == 1:
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


def config_of(block_m: int, gated: bool, in_fp8: bool) -> TileConfig:
    """Return the fastest configuration for tiles of so many choices (measured on an H200, with 128 experts of 768)."""
    is_large = block_m == 128
    if in_fp8:  # block_k numbers share a scale; the products of a block fill registers of their own
        block_n = 128 if is_large and not gated else 64
        stages = 4 if is_large else 3 if gated else 5  # so that three of the small programs share a multiprocessor
        return TileConfig(block_m, block_n, FP8_BLOCK.value, 1, 8 if is_large else 4, stages, persistent=is_large)
    if is_large:
        return TileConfig(block_m, 128 if gated else 256, 64, warps=8, stages=3, persistent=True)
    block_k, stages = (128, 3) if block_m == 16 else (64, 4)
    return TileConfig(block_m, 64, block_k, stages=stages)


def _multiply(
    x: Tensor | Fp8Tokens,
    weight: ExpertWeights,
    epilogue: Epilogue,
    out: Tensor,
    chosen: Chosen,
    block_m: int,
    activation: AnyActivation | None,
    in_order: bool,
) -> None:
    """Multiply each choice's input with its expert's weight, [experts, out_features, in_features].

    activation: given for the first product, which reads x of the choices' tokens and writes in the order of `chosen`;
        None for the second, which reads that, and writes what expert_mlps' pieces are
    in_order: a product and a sum are never rounded once together, which tiles of one size alone might do
    """
    vectors, x_scales = (x.numbers, x.scales) if isinstance(x, Fp8Tokens) else (x, None)
    assert vectors.is_contiguous()
    gated = activation is not None and not isinstance(activation, Ungated)
    if isinstance(weight, GroupWeight):
        operand, config = group_operand_and_config(weight, vectors, block_m)
        epilogue = epilogue._replace(factors=weight.factors)
    else:
        operand = fp8_operand(weight) if isinstance(weight, Fp8Weight) else plain_operand(weight)
        config = config_of(block_m, gated, x_scales is not None)
        stage = (block_m + config.block_n * (2 if gated else 1)) * (config.block_k * operand.numbers.itemsize + 4)
        config = config._replace(stages=stages_that_fit(config.stages, stage, out.device))
    multiply_tiles(vectors, operand, config, out, epilogue, activation, chosen, x_scales, not in_order)
