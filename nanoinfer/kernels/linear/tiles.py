"""The tile kernel: the products of some tokens' vectors with some rows of a weight, of any format, dense or of experts.

A format is an operand, whose JIT function adds up the products of one tile. All else is here: which tile a program
has, pieces of the inputs, what comes behind the products. A dense weight is one expert, whose tokens need no table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import cdiv, launch_options, num_multiprocessors, shared_memory, wait_for_predecessor
from nanoinfer.kernels.linear.activation import (
    Activation,
    AnyActivation,
    Function,
    activate_block,
    gate_mul_block,
    gated_row,
    split_activation,
)
from nanoinfer.kernels.linear.operands.operand import Operand
from nanoinfer.kernels.sorting import Groups

NEIGHBOURS = tl.constexpr(8)  # tiles of tokens that are computed side by side, with the same rows of the weight


class TileConfig(NamedTuple):
    """How a product is cut: into tiles of tokens by rows of the weight, and each tile into pieces by its inputs.

    block_m: tokens of a tile, or experts' choices
    block_n: rows of the weight, or where an operand has them apart, gates and as many ups
    block_k: inputs that are multiplied at once, where the form of a weight leaves a choice
    pieces: each is computed from an equal share of the inputs
    stages: so many blocks of inputs are on their way at once
    used: so many of a tile's outputs are computed, and the others are another tile's; None: all
    fetched: lines of 128 bytes of each row that the L2 cache fetches before the wait
    persistent: there are as many programs as multiprocessors, and each goes over many tiles
    """

    block_m: int
    block_n: int
    block_k: int = 128
    pieces: int = 1
    warps: int = 4
    stages: int = 4
    used: int | None = None
    fetched: int = 0
    persistent: bool = False

    def programs(self, tokens: int, rows: int) -> int:
        """Return how many programs multiply so many tokens by a dense weight, one tile or piece each."""
        return cdiv(tokens, self.block_m) * cdiv(rows, self.used or self.block_n) * self.pieces


class Chosen(NamedTuple):
    """Which choices of experts a launch multiplies, of so many `used` ones for each token."""

    groups: Groups
    used: int


class Epilogue(NamedTuple):
    """What comes behind the products, in this order; None: nothing.

    factors: [experts and rows] float32, which multiply; bias: [experts and rows], which is added
    added: [choices, rows], which is added; shares: [tokens, used] float32, which multiply the choices' results
    """

    factors: Tensor | None = None
    bias: Tensor | None = None
    added: Tensor | None = None
    shares: Tensor | None = None


def multiply_tiles(
    x: Any,
    operand: Operand,
    config: TileConfig,
    out: Tensor,
    epilogue: Epilogue,
    activation: AnyActivation | None = None,
    chosen: Chosen | None = None,
    x_scales: Tensor | None = None,
    fused: bool = True,
) -> Tensor:
    """Multiply tokens' vectors by a weight, in one launch, cut as `config` says.

    x: [room, in_features], or a tensor descriptor of it
    out: [pieces, tokens, out_features], filled and returned, without the first dimension for one piece; the first piece
        has the bias. With experts: see `chosen`
    activation: the weight has gates before ups; out has act(gate) * up. Of Ungated, out has act(product)
    chosen: the experts' table; with an activation, x is the tokens', and out, [choices, out_features], in the order of
        the table; else x is in this order, and out [used, tokens, out_features]. None: the weight is dense
    x_scales: [in_features / 128, room] of x in FP8
    fused: a product and a sum may be rounded once together, which tiles of one size alone might do
    """
    assert config.pieces == 1 or activation is None  # the activation needs the whole sum
    assert chosen is not None or not config.persistent
    gates, after = split_activation(activation)
    rows, used = out.shape[-1] if operand.apart else operand.rows, config.used or config.block_n
    tokens = out.shape[-2] if chosen is None else chosen.groups.choices.shape[0] // chosen.used
    items = cdiv(rows, used) * (cdiv(tokens, config.block_m) if chosen is None else chosen.groups.tiles.shape[0])
    programs = min(items, num_multiprocessors(out.device)) if config.persistent else items
    share = cdiv(cdiv(operand.in_features, config.block_k), config.pieces)
    _tiles_kernel[(programs, config.pieces)](
        x,
        operand.numbers,
        Product(x_scales, operand.parts, epilogue, chosen and chosen.groups, out, rows, operand.in_features, share),
        tokens,
        1 if x_scales is None else x_scales.shape[1],
        items,
        ADD_PRODUCTS=operand.add_products,
        HOW=TileConstants(
            config.block_m,
            config.block_n,
            config.block_k,
            used,
            config.fetched,
            0 if chosen is None else chosen.used,
            config.pieces > 1,
            operand.in_features % config.block_k == 0,
            rows % config.block_n == 0 and used == config.block_n,
            operand.apart,
            operand.form,
            gates,
            after,
        ),
        num_warps=config.warps,
        num_stages=config.stages,
        **launch_options(out, fused),
    )
    return out if chosen is not None or config.pieces > 1 else out[0]


def stages_that_fit(most: int, bytes_of_stage: int, device: torch.device, together: int = 1) -> int:
    """Return how many blocks of inputs, at most, are on their way in each of the programs that share the memory."""
    return max(1, min(most, shared_memory(device) // (together * bytes_of_stage)))


class Product(NamedTuple):
    """What a launch multiplies, beside the vectors and the weight's numbers: see multiply_tiles, and Operand.

    Those may be tensor descriptors, which Triton takes from no tuple. share: the blocks of inputs of a piece
    """

    x_scales: Any
    parts: Any
    epilogue: Any
    groups: Any
    out: Any
    rows: Any
    in_features: Any
    share: Any


@dataclass(frozen=True)
class TileConstants:
    """What the kernel is compiled for: of a TileConfig and of an Operand what it is there.

    experts: that a token uses; 0: the weight is dense
    in_pieces: there are several
    whole, full: no tile has inputs, or rows, that are none
    activation: of gates, which multiply ups; after: of all products. Experts' first product has one of them
    """

    block_m: int
    block_n: int
    block_k: int
    used: int
    fetched: int
    experts: int
    in_pieces: bool
    whole: bool
    full: bool
    apart: bool
    form: Any
    activation: Activation | None
    after: Function | None


class Tile(NamedTuple):
    """What a program multiplies, as a format's products see it.

    sources: [block_m], the vectors in x; exists: which of them are any; first, end: where they begin and end, if dense
    rows: [block_n] int64, of all experts' matrices; has_row: which of them are any
    first_row, end_row: of one matrix, where the tile begins and ends
    begin, stop: the inputs that are multiplied
    """

    sources: Any
    exists: Any
    first: Any
    end: Any
    rows: Any
    has_row: Any
    first_row: Any
    end_row: Any
    begin: Any
    stop: Any


@triton.jit(do_not_specialize=["tokens", "room", "items"])
def _tiles_kernel(
    x, numbers, product, tokens, room, items, ADD_PRODUCTS: tl.constexpr, HOW: tl.constexpr, EARLY: tl.constexpr
):
    rows, groups = product.rows, product.groups
    if HOW.experts == 0:
        program, token_tiles = tl.program_id(0), tl.cdiv(tokens, HOW.block_m)
        token_tile, row_tile = 0, program
        if token_tiles > 1:  # programs that run side by side share what they read
            per_group = NEIGHBOURS * tl.cdiv(rows, HOW.used)
            first_tile = program // per_group * NEIGHBOURS
            group_tiles = tl.minimum(token_tiles - first_tile, NEIGHBOURS)
            token_tile = first_tile + program % per_group % group_tiles
            row_tile = program % per_group // group_tiles
        first, first_row = token_tile * HOW.block_m, row_tile * HOW.used
        expert = tl.full([], 0, tl.int64)
        sources, end_row = first + tl.arange(0, HOW.block_m), tl.minimum(first_row + HOW.used, rows)
        _multiply_tile(
            x,
            numbers,
            product,
            tokens,
            room,
            expert,
            first,
            tokens,
            sources,
            first_row,
            end_row,
            ADD_PRODUCTS,
            HOW,
            EARLY,
        )
    else:
        wait_for_predecessor(EARLY)
        blocks = tl.cdiv(rows, HOW.block_n)
        for item in range(tl.program_id(0), items, tl.num_programs(0)):
            place = groups.tiles + item // blocks * 3
            expert, first, end = tl.load(place).to(tl.int64), tl.load(place + 1), tl.load(place + 2)
            if first < end:
                sources, first_row = first + tl.arange(0, HOW.block_m), item % blocks * HOW.block_n
                if HOW.activation is not None or HOW.after is not None:
                    sources = tl.load(groups.choices + sources, mask=sources < end, other=0) // HOW.experts
                _multiply_tile(
                    x,
                    numbers,
                    product,
                    tokens,
                    room,
                    expert,
                    first,
                    end,
                    sources,
                    first_row,
                    rows,
                    ADD_PRODUCTS,
                    HOW,
                    False,
                )


@triton.jit
def _multiply_tile(
    x,
    numbers,
    product,
    tokens,
    room,
    expert,
    first,
    end,
    sources,
    first_row,
    end_row,
    ADD_PRODUCTS: tl.constexpr,
    HOW: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Multiply the vectors `sources`, from `first` to `end`, by an expert's rows from first_row to end_row."""
    ACTIVATION: tl.constexpr = HOW.activation
    AFTER: tl.constexpr = HOW.after
    GATED: tl.constexpr = ACTIVATION is not None
    M: tl.constexpr = HOW.block_m
    N: tl.constexpr = HOW.block_n
    TOKENS_LEFT: tl.constexpr = HOW.apart and M >= 64
    epilogue, groups, rows = product.epilogue, product.groups, product.rows
    weight_rows = rows * 2 if GATED and HOW.apart else rows  # of a matrix
    position, place = first + tl.arange(0, M), first_row + tl.arange(0, N)
    exists, has_row = position < end, place < end_row
    row = gated_row(place, rows) if GATED and not HOW.apart else place
    n = expert * weight_rows + row
    begin, stop, in_first = 0, product.in_features, has_row
    if HOW.in_pieces:
        share = product.share * HOW.block_k  # so that the compiler knows how a piece's words are aligned
        begin = tl.program_id(1) * share
        stop = tl.minimum(begin + share, product.in_features)
        in_first = place < tl.where(tl.program_id(1) == 0, end_row, 0)  # only the first piece has the bias
    factors, bias, up_bias = None, None, None
    if epilogue.factors is not None:
        factors = tl.load(epilogue.factors + n, mask=has_row, other=0.0)
    if epilogue.bias is not None:
        bias = tl.load(epilogue.bias + n, mask=in_first, other=0.0).to(tl.float32)
        if GATED and HOW.apart:
            up_bias = tl.load(epilogue.bias + n + rows, mask=in_first, other=0.0).to(tl.float32)
    tile = Tile(sources, exists, first, end, n, has_row, first_row, end_row, begin, stop)
    acc, up_acc = ADD_PRODUCTS(x, numbers, product, tile, room, HOW, EARLY)

    target, choice = position, None
    if HOW.experts > 0:
        choice = tl.load(groups.choices + position, mask=exists, other=0)  # late, as registers are short before
        if not GATED and AFTER is None:
            target = choice % HOW.experts * tokens + choice // HOW.experts
    elif HOW.in_pieces:
        target += tl.program_id(1) * tokens
    acc = _add_epilogue(acc, factors, bias, epilogue, choice, exists, row, has_row, weight_rows, TOKENS_LEFT)
    out, outputs = acc.to(product.out.dtype.element_ty), rows
    if AFTER is not None:
        out = activate_block(out.to(tl.float32), AFTER).to(out.dtype)
    if GATED and HOW.apart:
        up = row + rows
        up_acc = _add_epilogue(up_acc, None, up_bias, epilogue, choice, exists, up, has_row, weight_rows, TOKENS_LEFT)
        out = gate_mul_block(out, up_acc.to(out.dtype), ACTIVATION)
    if not TOKENS_LEFT:
        out = tl.trans(out)
    if GATED and not HOW.apart:
        gate, up = tl.split(tl.reshape(out, [M, N // 2, 2]))
        out, outputs, end_row = gate_mul_block(gate, up, ACTIVATION), rows // 2, end_row // 2
        place = first_row // 2 + tl.arange(0, N // 2)
    targets = product.out + target.to(tl.int64)[:, None] * outputs + place[None, :]
    tl.store(targets, out, mask=exists[:, None] & (place < end_row)[None, :])


@triton.jit
def _add_epilogue(
    acc,
    factors,
    bias,
    epilogue,
    choice,
    exists,
    n,
    has_row,
    weight_rows,
    TOKENS_LEFT: tl.constexpr,
):
    """Compute what comes behind the products of some choices, or tokens, with rows n of a matrix."""
    if factors is not None:
        acc *= factors[None, :] if TOKENS_LEFT else factors[:, None]
    if bias is not None:
        acc += bias[None, :] if TOKENS_LEFT else bias[:, None]
    if epilogue.added is not None:
        places = epilogue.added + choice.to(tl.int64)[:, None] * weight_rows + n[None, :]
        added = tl.load(places, mask=exists[:, None] & has_row[None, :], other=0.0).to(tl.float32)
        acc += added if TOKENS_LEFT else tl.trans(added)
    if epilogue.shares is not None:
        shares = tl.load(epilogue.shares + choice, mask=exists, other=0.0)
        acc *= shares[:, None] if TOKENS_LEFT else shares[None, :]
    return acc


@triton.jit
def load_block(ptrs, row_mask, column_mask, FULL: tl.constexpr, WHOLE: tl.constexpr):
    """Load [rows, columns]. FULL: all rows are any; WHOLE: so are all columns"""
    if FULL:
        return tl.load(ptrs) if WHOLE else tl.load(ptrs, mask=column_mask[None, :], other=0.0)
    elif WHOLE:
        return tl.load(ptrs, mask=row_mask[:, None], other=0.0)
    else:
        return tl.load(ptrs, mask=row_mask[:, None] & column_mask[None, :], other=0.0)
