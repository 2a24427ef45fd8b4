"""Products of several tokens with a GroupWeight, whose numbers tensor cores get in 16 bits.

The weight is the left operand: a thread takes the words that it needs from shared memory, and the numbers stay in its
registers. Integers are exact in 16 bits. Their scales multiply the float32 sum of each group, and so nothing is rounded
but sums. Of many tokens there are more sums than numbers: there the numbers of four bits with zeros are scaled, and
rounded as a copy of the weight would be. The products of an e2m1 and a scale of eight bits are exact in bfloat16.
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
        if group % step == 0 or (step % group == 0 and (is_first or (step == 2 * group and _has_pairs(weight)))):
            return step
    return None


def _has_pairs(weight: GroupWeight) -> bool:
    """Return whether the kernel can load the scales of two groups, and their zeros, as one number each."""
    groups = weight.in_features // weight.group
    parts = [part for part in (weight.scales, weight.zeros) if part is not None]
    return groups % 2 == 0 and all(part.is_contiguous() and part.itemsize <= 2 for part in parts)


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
    operand = group_operand(weight, x, step, in_order)
    stage = step * (config.block_m * x.itemsize + config.block_n * BITS[weight.numbers] // 8)
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

    scales_first: the numbers are scaled, and rounded unless groups.scales_are_exact; else their sums are
    halves: of the inputs that are loaded at once, each half has a group; native: on a GPU
    """

    numbers: Numbers
    group: int
    scales_first: bool
    halves: bool
    native: bool


def group_operand(weight: GroupWeight, x: Tensor, step: int, in_order: bool = False) -> Operand:
    """Return the operand of a dense weight for tokens' vectors x.

    step: the inputs that are multiplied at once; in_order: whatever the number of tokens, sums are scaled, or numbers
    """
    assert weight.words.is_contiguous()
    scales, zeros = readable(weight.scales), weight.zeros
    scales_row, scales_group = scales.stride()
    zeros_row, zeros_group = (None, None) if zeros is None else zeros.stride()
    parts = GroupParts(scales, zeros, scales_row, scales_group, zeros_row, zeros_group, weight.words.shape[1])
    is_exact = scales_are_exact(weight, x.dtype)
    is_first = is_exact or (zeros is not None and weight.numbers == "int4" and len(x) > 2 * MANY and not in_order)
    form = GroupForm(weight.numbers, weight.group, is_first, step > weight.group and not is_exact, x.is_cuda)
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
    HALVES: tl.constexpr = FORM.halves
    SPAN: tl.constexpr = K // 2 if HALVES else K  # inputs of a product, which have a group's scale, or those of several
    n = tl.minimum(tile.rows, rows - 1)[:, None]
    row_ptrs = words_ptr + n * parts.row_words
    if HOW.fetched > 0:
        line = tile.begin // PER_WORD + tl.arange(0, HOW.fetched) * LINE
        fetch(row_ptrs + tl.minimum(line, parts.row_words - 1)[None, :], EARLY)
    groups = in_features // GROUP
    scales = parts.scales + n * parts.scales_row, parts.scales_group, groups
    zeros = None
    if parts.zeros is not None:
        zeros = parts.zeros + n * parts.zeros_row, parts.zeros_group, groups
    next_scales = load_scales(scales, tile.begin, FORM, K)
    if parts.zeros is not None and HALVES:
        next_zero = load_scales(zeros, tile.begin, FORM, K)
    wait_for_predecessor(EARLY)

    k, word = tl.arange(0, SPAN), tl.arange(0, K // PER_WORD)
    m = tile.first + tl.arange(0, M)
    x_mask = (m < tile.end)[:, None]
    x_ptrs = x_ptr + m.to(tl.int64)[:, None] * in_features + k[None, :]
    acc = tl.zeros([N, M], tl.float32)
    for start in range(tile.begin, tile.stop, K):
        first_word = start // PER_WORD
        if HOW.whole:
            words = tl.load(row_ptrs + (first_word + word)[None, :])
        else:
            is_word = (first_word + word < parts.row_words)[None, :]
            words = tl.load(row_ptrs + (first_word + word)[None, :], mask=is_word, other=0)
        x = _load_inputs(x_ptrs, start, x_mask, in_features, HOW.whole, SPAN)
        if HALVES:
            second_x = _load_inputs(x_ptrs, start + SPAN, x_mask, in_features, HOW.whole, SPAN)
            words, second_words = tl.split(tl.permute(tl.reshape(words, [N, 2, SPAN // PER_WORD]), (0, 2, 1)))
        now, next_scales = next_scales, load_scales(scales, start + K, FORM, K)
        zero = None
        if parts.zeros is not None and HALVES:
            zero, next_zero = next_zero, load_scales(zeros, start + K, FORM, K)
        elif parts.zeros is not None:  # loaded a step before, they would send the numbers through shared memory
            zero = load_scales(zeros, start, FORM, K)
        if HALVES:
            first_scales, second_scales = halve(now, parts.scales.dtype.element_ty)
            second_zero = None
            if parts.zeros is not None:
                zero, second_zero = halve(zero, parts.zeros.dtype.element_ty)
            acc = _add_group(acc, words, x, first_scales, zero, HOW)
            acc = _add_group(acc, second_words, second_x, second_scales, second_zero, HOW)
        else:
            acc = _add_group(acc, words, x, now, zero, HOW)
    return acc, acc


@triton.jit
def _load_inputs(x_ptrs, start, x_mask, in_features, WHOLE: tl.constexpr, SPAN: tl.constexpr):
    """Load the inputs of some tokens from `start` on, [tokens, SPAN]; those past the end are 0."""
    if WHOLE:
        return tl.load(x_ptrs + start, mask=x_mask, other=0.0)
    else:
        exists = (start + tl.arange(0, SPAN) < in_features)[None, :]
        return tl.load(x_ptrs + start, mask=x_mask & exists, other=0.0)


@triton.jit
def _add_group(acc, words, x, scales, zeros, HOW: tl.constexpr):
    """Add the product of some words, [rows, words], with inputs, [tokens, inputs].

    scales, zeros: of their group; or, where scales multiply the numbers, those of several, [rows, groups]
    """
    FORM: tl.constexpr = HOW.form
    NUMBERS: tl.constexpr = FORM.numbers
    SPAN: tl.constexpr = x.shape[1]
    zero = zeros if zeros is None else zeros.to(tl.int32)
    if FORM.scales_first:
        COUNT: tl.constexpr = scales.shape[1]
        factors = spread_factors(narrow(scales, x.dtype), words.shape[1], SPAN // COUNT)
        weight = unpack_tile(words, zero, factors, NUMBERS, x.dtype, FORM.native)
        return tl.dot(weight, tl.trans(x), acc)
    else:
        sums = tl.dot(unpack_tile(words, zero, None, NUMBERS, x.dtype, FORM.native), tl.trans(x))
        return acc + sums * widen(scales)


@triton.jit
def load_scales(of_rows, start, FORM: tl.constexpr, K: tl.constexpr):
    """Load what the groups of a step's inputs have, [rows, groups]; of halves two are one number, [rows, 1]."""
    ptrs, _, groups = of_rows
    if FORM.halves:
        WIDE: tl.constexpr = tl.uint16 if ptrs.dtype.element_ty.primitive_bitwidth == 8 else tl.uint32
        return tl.load((ptrs + tl.minimum(start // FORM.group, groups - 2)).to(tl.pointer_type(WIDE)))
    else:
        return load_groups(of_rows, start, FORM.group, K)


@triton.jit
def halve(both, DTYPE: tl.constexpr):
    """Return the two scales, or zeros, that load_scales loaded as one number."""
    if DTYPE.primitive_bitwidth == 8:
        first, second = (both & 0xFF).to(tl.uint8), (both >> 8).to(tl.uint8)
    else:
        first, second = (both & 0xFFFF).to(tl.uint16), (both >> 16).to(tl.uint16)
    return first.to(DTYPE, bitcast=True), second.to(DTYPE, bitcast=True)


@triton.jit
def load_groups(of_rows, start, GROUP: tl.constexpr, SPAN: tl.constexpr):
    """Load what the groups of some inputs have, from `start` on, [rows, groups]; past the end, the last's.

    of_rows: pointers to each row's first, [rows, 1]; the stride of a row's groups, and their number
    """
    ptrs, stride, groups = of_rows
    group = start // GROUP + tl.arange(0, SPAN // GROUP if GROUP < SPAN else 1)
    return tl.load(ptrs + tl.minimum(group, groups - 1)[None, :] * stride)


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
