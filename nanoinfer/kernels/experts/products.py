"""The products of tokens with the experts that they use: gate and up, the activation, down, and the weighted sum.

The choices of all tokens are sorted by expert, and cut into tiles of choices of one expert. A program multiplies one
tile with some rows of its expert's weight. The launch has programs for as many tiles as any routing of so many tokens
needs: the last ones find no tile and end. So the host needs not know the routing, and a graph can hold the launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.experts.one_group_row import one_group_row_expert_mlps
from nanoinfer.kernels.experts.one_row import is_one_row, one_row_expert_mlps
from nanoinfer.kernels.experts.operand import ExpertWeights, Operand
from nanoinfer.kernels.experts.route import Routes, group_triton
from nanoinfer.kernels.experts.tiles import multiply_tiles
from nanoinfer.kernels.fp8 import Fp8Weight, quantize
from nanoinfer.kernels.groups import GroupWeight
from nanoinfer.kernels.launch import early_launch, wait_for_predecessor
from nanoinfer.kernels.linear.activation import Activation
from nanoinfer.kernels.linear.dispatch import linear
from nanoinfer.kernels.linear.in_parts import WeightInParts

BLOCK = 1024  # of the numbers of a token that a program adds up


Gather = Callable[[Tensor], Tensor]


def expert_mlps(
    x: Tensor,
    routes: Routes,
    gate_up: Tensor | Fp8Weight | Sequence[WeightInParts],
    down: Tensor | Fp8Weight | Sequence[WeightInParts],
    activation: Activation,
    may_split: bool = False,
    in_order: bool = False,
    gather: Gather | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
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
    An expert computes down @ (act(gate @ x) * (up @ x)), and adds its biases. Returns [tokens, hidden_size].
    Weights in FP8 are such that kernels.linear.fp8_linear.can_multiply_fp8. With them, the kernels round several tokens
    to FP8 too, and their results of the activation; if in_order, also a single token's.
    """
    if x.is_cuda:
        assert isinstance(gate_up, (Tensor, Fp8Weight))
        assert isinstance(down, (Tensor, Fp8Weight))
        how = may_split, in_order, gather
        return expert_mlps_triton(x, routes, gate_up, down, activation, *how, gate_up_bias, down_bias)
    assert not isinstance(gate_up, Fp8Weight)
    assert not isinstance(down, Fp8Weight)
    return expert_mlps_reference(x, routes, gate_up, down, activation, gather, gate_up_bias, down_bias)


def expert_mlps_reference(
    x: Tensor,
    routes: Routes,
    gate_up: Tensor | Sequence[WeightInParts],
    down: Tensor | Sequence[WeightInParts],
    activation: Activation,
    gather: Gather | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """expert_mlps in torch: the host goes over the experts that any token uses."""
    tokens, used = routes.experts.shape
    flat = routes.experts.flatten()
    order, counts = flat.argsort(stable=True), flat.bincount().tolist()
    groups = [(expert, choices) for expert, choices in enumerate(order.split(counts)) if len(choices)]

    gate_up_biases, down_biases = (
        [None] * len(gate_up) if biases is None else list(biases) for biases in (gate_up_bias, down_bias)
    )
    gated = torch.cat([linear(x[choices // used], gate_up[i], gate_up_biases[i], activation) for i, choices in groups])
    inputs = (gated if gather is None else gather(gated)).split([len(choices) for _, choices in groups])
    products = torch.cat([linear(rows, down[i], down_biases[i]) for rows, (i, _) in zip(inputs, groups, strict=True)])
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
) -> Tensor:
    """expert_mlps as four launches and, unless `may_split`, a fifth for the sum; for one token two, unless `in_order`.

    With weights in FP8, each product of several tokens, or `in_order`, has a launch more, which rounds its input.
    `gather` comes behind the first product, and at the end.
    """
    in_fp8 = isinstance(down, Fp8Weight)
    count, outputs, size = Operand.of(down, x.dtype).shape
    if not in_order and is_one_row(x, routes, size):
        if isinstance(gate_up, GroupWeight) and isinstance(down, GroupWeight):
            return one_group_row_expert_mlps(x, routes, gate_up, down, activation, gate_up_bias, down_bias)
        assert not isinstance(gate_up, GroupWeight)
        assert not isinstance(down, GroupWeight)
        return one_row_expert_mlps(x, routes, gate_up, down, activation, gate_up_bias, down_bias)
    tokens, used = routes.experts.shape
    block_m = choices_in_a_tile(tokens * used, count)
    groups = group_triton(routes.experts, count, block_m)
    gated = x.new_empty(tokens * used, Operand.of(gate_up, x.dtype).shape[1] // 2)
    vectors = quantize(x) if in_fp8 else x
    multiply_tiles(vectors, gate_up, gate_up_bias, gated, groups, block_m, routes, activation, in_order)
    if gather is not None:
        gated = gather(gated)
    results = x.new_empty(used, tokens, outputs)
    flat = results.view(used * tokens, outputs)
    vectors = quantize(gated) if in_fp8 else gated
    multiply_tiles(vectors, down, down_bias, flat, groups, block_m, routes, None, in_order)
    if used == 1:
        result = results[0]
    elif may_split and tokens > 1:
        return results
    else:
        result = add_pieces_triton(results)
    return result if gather is None else gather(result)


def choices_in_a_tile(choices: int, count: int) -> int:
    """Return the size of tiles with which one of `count` experts, if its use is average, has one tile, or full ones."""
    average = choices / count
    return 16 if average <= 8 else 32 if average <= 24 else 64 if average <= 96 else 128


def add_pieces_triton(pieces: Tensor) -> Tensor:
    """Add up pieces, [pieces, tokens, size] to [tokens, size], in float32 and in their order."""
    count, tokens, size = pieces.shape
    out = pieces.new_empty(tokens, size)
    grid = (tokens, triton.cdiv(size, BLOCK))
    _add_pieces_kernel[grid](pieces, out, tokens * size, size, PIECES=count, BLOCK=BLOCK, **early_launch(pieces))
    return out


@triton.jit
def _add_pieces_kernel(
    pieces_ptr, out_ptr, stride, size, PIECES: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    wait_for_predecessor(EARLY)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.program_id(0).to(tl.int64) * size + i
    total = tl.zeros([BLOCK], tl.float32)
    for piece in tl.static_range(PIECES):
        from_piece = pieces_ptr + piece * stride.to(tl.int64) + place
        total += tl.load(from_piece, mask=i < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, total, mask=i < size)
