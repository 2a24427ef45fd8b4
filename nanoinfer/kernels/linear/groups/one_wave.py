"""Products of several tokens with a dense GroupWeight: how they are cut, and when numbers are scaled, or their sums.

Of many tokens there are more sums than numbers: there the numbers of four bits with zeros are scaled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanoinfer.kernels.groups import BITS, GroupWeight, scales_are_exact
from nanoinfer.kernels.launch import cdiv, num_multiprocessors, shared_memory
from nanoinfer.kernels.linear.activation import Activation
from nanoinfer.kernels.linear.groups.tiles import group_operand, is_rounded_once, scales_come_first, step_of
from nanoinfer.kernels.linear.tiles import Epilogue, TileConfig, multiply_tiles

BLOCK = 32  # inputs; a whole number of groups.pack's blocks
MANY = 64  # tokens; of more, several tiles read the same rows of the weight
MAX_PIECES = {16: 6, 32: 4, 64: 4}  # by the tokens of a tile: the next kernel has to add them
LEAST_INPUTS = 1024  # of a piece
IN_SUMS = 32  # tokens, up to which minima multiply sums of their vectors; of more there are too many sums
MOST_SHORT, SHORT = 8, 512  # pieces, and inputs of each, where blocks have factors


def can_multiply(x: torch.dtype, weight: GroupWeight) -> bool:
    """Return whether the kernel multiplies tokens by the weight. x: the dtype of the tokens' vectors"""
    has_products = weight.group % BLOCK == 0 or scales_are_exact(weight, x) or is_rounded_once(weight)
    has_products = has_products or weight.blocks is not None
    return x.itemsize == 2 and weight.in_features % BLOCK == 0 and has_products and step_of(weight, x) is not None


def has_few_tiles(x: Tensor, weight: GroupWeight) -> bool:
    """Return whether pieces and their sum, in a launch of its own, take less time than tiles one by one."""
    return len(x) <= MANY and cdiv(len(weight.words), 64) < num_multiprocessors(x.device)


def find_config(x: Tensor, weight: GroupWeight, may_split: bool) -> TileConfig:
    """Return the configuration for what can_multiply says.

    All were measured on an H100 with groups of 128, those of int4 for up to 64 tokens again on an H200, and there those
    with zeros: numbers would go through shared memory if a program had as many rows as threads.
    """
    step = step_of(weight, x.dtype)
    assert step is not None
    tokens, weight_rows, multiprocessors = len(x), len(weight.words), num_multiprocessors(x.device)

    def programs(block_m: int, block_n: int) -> int:
        return cdiv(tokens, block_m) * cdiv(weight_rows, block_n)

    if weight.blocks is not None and tokens <= MANY:
        return _config_of_blocks(x, weight, may_split)
    if tokens > MANY and weight.zeros is not None:
        if tokens > 4 * MANY and not may_split:
            return TileConfig(256, 128, warps=8, stages=3)
        block_m, together = (64, 3) if tokens <= 2 * MANY else (128, 2)
        most = together * multiprocessors // programs(block_m, 64) if may_split else 1
        return TileConfig(block_m, 64, pieces=_pieces(weight, step, most), stages=3)
    if tokens > MANY:
        if may_split:
            pieces = _pieces(weight, step, 2 * multiprocessors // programs(64, 128))
            return TileConfig(64, 128, pieces=pieces, stages=3)
        is_small = tokens <= 2 * MANY or programs(64, 64) <= 3 * multiprocessors
        return TileConfig(64, 64, stages=3) if is_small else TileConfig(128, 128, warps=8, stages=5)
    block_m = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
    tiles = programs(block_m, 64)
    is_int4 = weight.numbers == "int4"
    if block_m < 64 and tiles > 2 * multiprocessors and weight.zeros is None:
        warps, stages = (4, 4) if is_int4 else (8, 5)
        return TileConfig(block_m, 128, warps=warps, stages=stages, fetched=2)
    pieces = _pieces(weight, step, min(3 * multiprocessors // tiles, MAX_PIECES[block_m])) if may_split else 1
    together = cdiv(tiles * pieces, multiprocessors)  # on a multiprocessor
    stages = (6 if is_int4 else 8) if together == 1 else 4 if together == 2 else 3
    fetched = 0 if pieces > 1 else 4 if is_int4 and together == 1 else 2
    return TileConfig(block_m, 64, pieces=pieces, stages=stages, fetched=fetched)


def _config_of_blocks(x: Tensor, weight: GroupWeight, may_split: bool) -> TileConfig:
    """Return the configuration for up to MANY tokens and a weight whose blocks have factors, measured on an H200."""
    block_m, step = next(size for size in (16, 32, 64) if len(x) <= size), step_of(weight, x.dtype)
    tiles = cdiv(len(weight.words), 64)
    assert step is not None
    most = min(4 * num_multiprocessors(x.device) // tiles, MOST_SHORT)
    pieces = _pieces(weight, step, most, SHORT) if may_split else 1
    stages = 3 if pieces > 4 or block_m == 64 else 6
    return TileConfig(block_m, 64, pieces=pieces, stages=stages, fetched=2 if pieces == 1 else 0)


def _pieces(weight: GroupWeight, step: int, most: int, least: int = LEAST_INPUTS) -> int:
    """Return the largest number of equal pieces, up to `most`, of at least so many inputs, which cut no block."""
    steps = cdiv(weight.in_features, step)
    most, block = min(most, steps * step // least), weight.block or step
    fits = (pieces for pieces in range(1, most + 1) if steps % pieces == 0 and steps // pieces * step % block == 0)
    return max(fits, default=1)


def one_wave_triton(
    x: Tensor,
    weight: GroupWeight,
    config: TileConfig,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    in_order: bool = False,
) -> Tensor:
    """Compute kernels.linear.dispatch.linear in one launch, cut as `config` says.

    Several pieces are [pieces, tokens, out_features] float32; the first has the bias.
    in_order: all tiles add up alike, one rounded product after the other
    """
    assert x.is_contiguous()
    rows = len(weight.words) // 2 if activation else len(weight.words)
    out_dtype = x.dtype if config.pieces == 1 else torch.float32
    out = torch.empty((config.pieces, len(x), rows), dtype=out_dtype, device=x.device)
    step = step_of(weight, x.dtype)
    assert step is not None
    if weight.blocks is None:
        is_many = len(x) > 2 * MANY and weight.zeros is not None and weight.numbers == "int4" and not in_order
        is_first = is_many or scales_come_first(weight, x.dtype)
    else:
        is_first = not in_order and (len(x) > IN_SUMS if weight.has_minima else IN_SUMS < len(x) <= MANY)
    operand = group_operand(weight, x, step, is_first)
    stage = step * (config.block_m * x.itemsize + config.block_n * BITS[weight.numbers] // 8)
    # Unpacked, the numbers may go through shared memory.
    room, tile = shared_memory(x.device), config.block_n * step * x.itemsize
    stages = max(min(config.stages, room // stage, (room - tile) // stage + 1), 1)
    epilogue = Epilogue(factors=weight.factors, bias=bias)
    return multiply_tiles(
        x, operand, config._replace(block_k=step, stages=stages), out, epilogue, activation, fused=not in_order
    )
