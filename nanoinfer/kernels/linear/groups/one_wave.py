"""Products of several tokens with a GroupWeight, whose numbers tensor cores get in 16 bits.

The weight is the left operand: a thread takes the words that it needs from shared memory, and the numbers stay in its
registers. Integers are exact in 16 bits. Their scales multiply the float32 sum of each group, and so nothing is rounded
but sums. The products of an e2m1 and a scale of eight bits are exact in bfloat16, and so are multiplied as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.groups import BITS, GroupWeight, Numbers, scales_are_exact
from nanoinfer.kernels.launch import cdiv, fetch, num_multiprocessors, shared_memory, wait_for_predecessor
from nanoinfer.kernels.linear.activation import Activation
from nanoinfer.kernels.linear.groups.scales import narrow, readable, widen
from nanoinfer.kernels.linear.operand import Operand
from nanoinfer.kernels.linear.tiles import Epilogue, TileConfig, multiply_tiles
from nanoinfer.kernels.unpacking import unpack_tile

BLOCK = 32  # inputs; a whole number of groups.pack's blocks
MOST_GROUPS = 2  # of one step, if sums are scaled: each takes columns of its own in the product
MANY = 64  # tokens; of more, several tiles read the same rows of the weight
MAX_PIECES = {16: 6, 32: 4, 64: 4}  # by the tokens of a tile: the next kernel has to add them
LEAST_INPUTS = 1024  # of a piece
LINE = tl.constexpr(32)  # words that the L2 cache fetches at once


def can_multiply(x: torch.dtype, weight: GroupWeight) -> bool:
    """Return whether the kernel multiplies tokens by the weight. x: the dtype of the tokens' vectors"""
    return x.itemsize == 2 and step_of(weight, x) is not None


def step_of(weight: GroupWeight, dtype: torch.dtype) -> int | None:
    """Return how many inputs the kernel multiplies at a time; None: it cannot multiply these.

    dtype: of the tokens' vectors
    """
    group, is_first = weight.group, scales_are_exact(weight, dtype)
    if weight.in_features % BLOCK or (group % BLOCK and not (is_first and group == 16)):
        return None
    for step in (128, 64, 32):
        if group % step == 0 or (step % group == 0 and (is_first or step // group <= MOST_GROUPS)):
            return step
    return None


def find_config(x: Tensor, weight: GroupWeight, may_split: bool) -> TileConfig:
    """Return the configuration for what can_multiply says.

    All were measured on an H100 with groups of 128, those of int4 for up to 64 tokens again on an H200.
    """
    step = step_of(weight, x.dtype)
    assert step is not None
    tokens, weight_rows, multiprocessors = len(x), len(weight.words), num_multiprocessors(x.device)

    def programs(block_m: int, block_n: int) -> int:
        return cdiv(tokens, block_m) * cdiv(weight_rows, block_n)

    if tokens > MANY:
        if may_split:
            pieces = _pieces(weight, step, 2 * multiprocessors // programs(64, 128))
            return TileConfig(64, 128, pieces=pieces, stages=3)
        is_small = tokens <= 2 * MANY or programs(64, 64) <= 3 * multiprocessors
        return TileConfig(64, 64, stages=3) if is_small else TileConfig(128, 128, warps=8, stages=5)
    block_m = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
    tiles = programs(block_m, 64)
    is_int4 = weight.numbers == "int4"
    if block_m < 64 and tiles > 2 * multiprocessors:
        warps, stages = (4, 4) if is_int4 else (8, 5)
        return TileConfig(block_m, 128, warps=warps, stages=stages, fetched=2)
    pieces = _pieces(weight, step, min(3 * multiprocessors // tiles, MAX_PIECES[block_m])) if may_split else 1
    together = cdiv(tiles * pieces, multiprocessors)  # on a multiprocessor
    stages = (6 if is_int4 else 8) if together == 1 else 4 if together == 2 else 3
    fetched = 0 if pieces > 1 else 4 if is_int4 and together == 1 else 2
    return TileConfig(block_m, 64, pieces=pieces, stages=stages, fetched=fetched)


def _pieces(weight: GroupWeight, step: int, most: int) -> int:
    """Return the largest number of equal pieces, up to `most`, of which none is too short."""
    steps = cdiv(weight.in_features, step)
    most = min(most, steps * step // LEAST_INPUTS)
    return max((pieces for pieces in range(1, most + 1) if steps % pieces == 0), default=1)


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
    operand = group_operand(weight, x, step)
    groups = 1 if operand.form.scales_first else operand.form.groups
    stage = step * (config.block_m * groups * x.itemsize + config.block_n * BITS[weight.numbers] // 8)
    # Unpacked, the numbers may go through shared memory.
    room, tile = shared_memory(x.device), config.block_n * step * x.itemsize
    stages = max(min(config.stages, room // stage, (room - tile) // stage + 1), 1)
    epilogue = Epilogue(factors=weight.factors, bias=bias)
    return multiply_tiles(
        x, operand, config._replace(block_k=step, stages=stages), out, epilogue, activation, fused=not in_order
    )


class GroupParts(NamedTuple):
    """What the kernel reads of a GroupWeight, beside its words: tensors, and strides."""

    scales: Tensor
    zeros: Tensor | None
    scales_row: int
    scales_group: int
    zeros_row: int | None
    zeros_group: int | None
    row_words: int


@dataclass(frozen=True)
class GroupForm:
    """What the kernel is compiled for; numbers, group: of groups.GroupWeight

    groups: that are multiplied at once; scales_first: groups.scales_are_exact; native: on a GPU
    """

    numbers: Numbers
    group: int
    groups: int
    scales_first: bool
    native: bool


def group_operand(weight: GroupWeight, x: Tensor, step: int) -> Operand:
    """Return the operand of a dense weight for tokens' vectors x. step: the inputs that are multiplied at once"""
    assert weight.words.is_contiguous()
    scales, zeros = readable(weight.scales), weight.zeros
    scales_row, scales_group = scales.stride()
    zeros_row, zeros_group = (None, None) if zeros is None else zeros.stride()
    parts = GroupParts(scales, zeros, scales_row, scales_group, zeros_row, zeros_group, weight.words.shape[1])
    groups, is_first = max(step // weight.group, 1), scales_are_exact(weight, x.dtype)
    form = GroupForm(weight.numbers, weight.group, groups, is_first, x.is_cuda)
    return Operand(weight.words, parts, form, _add_products, len(weight.words), weight.in_features, apart=False)


@triton.jit
def _add_products(x_ptr, words_ptr, product, tile, room, HOW: tl.constexpr, EARLY: tl.constexpr):
    """Return the products of a tile: see linear.plain.add_products."""
    M: tl.constexpr = HOW.block_m
    N: tl.constexpr = HOW.block_n
    FORM: tl.constexpr = HOW.form
    NUMBERS: tl.constexpr = FORM.numbers
    GROUP: tl.constexpr = FORM.group
    parts, in_features, rows = product.parts, product.in_features, product.rows
    PER_WORD: tl.constexpr = 4 if NUMBERS == "int8" else 8
    K: tl.constexpr = HOW.block_k
    WORDS: tl.constexpr = K // PER_WORD
    COLUMNS: tl.constexpr = 1 if FORM.scales_first else FORM.groups  # of the product, for each token
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    n = tl.minimum(tile.rows, rows - 1)[:, None]
    row_ptrs = words_ptr + n * parts.row_words
    if HOW.fetched > 0:
        line = tile.begin // PER_WORD + tl.arange(0, HOW.fetched) * LINE
        fetch(row_ptrs + tl.minimum(line, parts.row_words - 1)[None, :], EARLY)
    groups = in_features // GROUP
    scale_ptrs = parts.scales + n * parts.scales_row
    next_scales = load_groups(scale_ptrs, parts.scales_group, tile.begin, groups, GROUP, K)
    if parts.zeros is not None:
        zero_ptrs = parts.zeros + n * parts.zeros_row
        next_zeros = load_groups(zero_ptrs, parts.zeros_group, tile.begin, groups, GROUP, K)
    wait_for_predecessor(EARLY)

    k, word = tl.arange(0, K), tl.arange(0, WORDS)
    column = tl.arange(0, M * COLUMNS)
    m = tile.first + column // COLUMNS
    x_mask = (m < tile.end)[:, None]
    if COLUMNS > 1:
        x_mask = x_mask & (k[None, :] // GROUP == (column % COLUMNS)[:, None])
    x_ptrs = x_ptr + m.to(tl.int64)[:, None] * in_features + k[None, :]
    acc = tl.zeros([N, M], tl.float32)
    for start in range(tile.begin, tile.stop, K):
        first_word = start // PER_WORD
        if HOW.whole:
            x = tl.load(x_ptrs + start, mask=x_mask, other=0.0)
            words = tl.load(row_ptrs + (first_word + word)[None, :])
        else:
            x = tl.load(x_ptrs + start, mask=x_mask & (start + k < in_features)[None, :], other=0.0)
            is_word = (first_word + word < parts.row_words)[None, :]
            words = tl.load(row_ptrs + (first_word + word)[None, :], mask=is_word, other=0)
        scales, zeros, after = next_scales, None, start + K
        next_scales = load_groups(scale_ptrs, parts.scales_group, after, groups, GROUP, K)
        if parts.zeros is not None:
            zeros = spread(next_zeros.to(tl.int32), WORDS)
            next_zeros = load_groups(zero_ptrs, parts.zeros_group, after, groups, GROUP, K)
        if FORM.scales_first:
            factors = spread_factors(narrow(scales, DTYPE), WORDS, K // FORM.groups)
            weight = unpack_tile(words, zeros, factors, NUMBERS, DTYPE, FORM.native)
            acc = tl.dot(weight, tl.trans(x), acc)
        else:
            sums = tl.dot(unpack_tile(words, zeros, None, NUMBERS, DTYPE, FORM.native), tl.trans(x))
            if COLUMNS == 1:
                acc += sums * widen(scales)
            else:
                of_groups = tl.reshape(sums, [N, M, COLUMNS]) * widen(scales)[:, None, :]
                acc += tl.sum(of_groups, axis=2)
    return acc, acc


@triton.jit
def load_groups(row_ptrs, stride, start, groups, GROUP: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load what the groups of a step's inputs have, [rows, groups]; row_ptrs: [rows, 1]; past the end, the last's."""
    group = start // GROUP + tl.arange(0, BLOCK_K // GROUP if GROUP < BLOCK_K else 1)
    return tl.load(row_ptrs + tl.minimum(group, groups - 1)[None, :] * stride)


@triton.jit
def spread(groups, WORDS: tl.constexpr):
    """Give each word what its group has, [rows, groups] to [rows, words], or to one that broadcasts."""
    if groups.shape[1] == 1:
        return groups
    else:
        ROWS: tl.constexpr = groups.shape[0]
        COUNT: tl.constexpr = groups.shape[1]
        wide = tl.broadcast_to(groups[:, :, None], [ROWS, COUNT, WORDS // COUNT])
        return tl.reshape(wide, [ROWS, WORDS])


@triton.jit
def spread_factors(groups, WORDS: tl.constexpr, GROUP: tl.constexpr):
    """spread as unpack_tile takes it: for the first and the second halves of the words' blocks of 32 numbers."""
    if GROUP == 16:
        first, second = tl.split(tl.reshape(groups, [groups.shape[0], groups.shape[1] // 2, 2]))
        return spread(first, WORDS), spread(second, WORDS)
    else:
        both = spread(groups, WORDS)
        return both, both
