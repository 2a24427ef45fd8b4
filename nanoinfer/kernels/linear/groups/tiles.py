"""A GroupWeight as the tile kernel's operand, dense or of experts: words become numbers that tensor cores take.

The weight is the left operand: a thread takes the words that it needs from shared memory, and the numbers stay in its
registers. Integers are exact in 16 bits. Their scales multiply the float32 sum of each group, and so nothing is rounded
but sums. Or the scales multiply the numbers: rounded as a copy of the weight would be, but exact for an e2m1.

Where blocks of groups have factors, a number is rounded once: when its group's scale has multiplied it. The factors
multiply float32 sums. The groups' minima multiply float32 sums of the tokens' vectors, behind all others. Of many
tokens there are more sums than numbers. There a number is rounded once both have multiplied it, less its minimum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.groups import GroupWeight, Numbers, scales_are_exact
from nanoinfer.kernels.launch import fetch, next_power_of_2, wait_for_predecessor
from nanoinfer.kernels.linear.groups.scales import (
    LOWERED,
    factors_of,
    load_factors,
    lower_half,
    readable,
    upper_half,
    widen,
)
from nanoinfer.kernels.linear.groups.sums import SLOTS, planes_of, sum_groups
from nanoinfer.kernels.linear.operands.operand import Operand
from nanoinfer.kernels.unpacking import bits_of, unpack_tile

STEPS = (128, 64, 32)  # inputs; a whole number of groups.pack's blocks
LINES_OF_SCALES = tl.constexpr(4)  # of a row, and of minima
LINE = tl.constexpr(32)  # words that the L2 cache fetches at once


def step_of(weight: GroupWeight, dtype: torch.dtype, most: int = 128) -> int | None:
    """Return how many inputs the kernel multiplies at a time, at most so many; None: it cannot multiply these.

    dtype: of the tokens' vectors
    """
    group, is_first = weight.group, scales_come_first(weight, dtype)
    is_row = group == weight.in_features
    for step in STEPS[:-1] if is_row else STEPS:  # a short step would copy words by fewer bytes than threads can
        has_pairs = step == 2 * group and _has_pairs(weight)
        if (
            step <= most
            and (weight.block or step) % step == 0
            and (group % step == 0 or (step % group == 0 and (is_first or has_pairs)))
        ):
            return step
    return min(most, next_power_of_2(group)) if is_row else None  # a step of two groups would want two scales


def scales_come_first(weight: GroupWeight, dtype: torch.dtype) -> bool:
    """Return whether scales multiply the numbers.

    Those of an e2m1 do, exactly, and those of groups that are too small, have minima, or lie in blocks with factors.
    """
    if weight.has_minima or weight.blocks is not None:
        return True
    return weight.group in (16, 32) and (weight.group == 16 or scales_are_exact(weight, dtype))


def is_rounded_once(weight: GroupWeight) -> bool:
    """Return whether the kernel, where scales multiply the numbers, does so in float32, and then rounds."""
    if weight.blocks is not None:
        return False
    return weight.numbers != "e2m1" and (weight.has_minima or weight.scales.dtype == torch.float32)


def _has_pairs(weight: GroupWeight) -> bool:
    """Return whether the kernel can load the scales of two groups, and their zeros, as one number each."""
    groups = weight.in_features // weight.group
    parts = [part for part in (weight.scales, weight.zeros) if part is not None]
    return groups % 2 == 0 and all(part.is_contiguous() and part.itemsize <= 4 for part in parts)


class GroupParts(NamedTuple):
    """What the kernel reads of a GroupWeight, beside its words: tensors, and strides; None: those of a contiguous one.

    sums: of the tokens' vectors, see sum_groups; None: the kernel needs none
    Triton makes constants of strides that are 1, and loses these on the way to the experts' products.
    """

    scales: Tensor
    zeros: Tensor | None
    scales_row: int | None
    scales_group: int | None
    zeros_row: int | None
    zeros_group: int | None
    blocks: Tensor | None
    sums: Tensor | None


@dataclass(frozen=True)
class GroupForm:
    """What the kernel is compiled for; numbers, group: of groups.GroupWeight

    scales_first: the numbers are scaled; else their sums are
    halves: of the inputs that are loaded at once, each half has a group
    paired: the scales of two groups are one number, and so are their zeros; native: on a GPU, in 16 bits
    block: inputs that have the same factor, and a whole number of steps; 0: there are no factors
    from_0: the numbers count from 0
    """

    numbers: Numbers
    group: int
    scales_first: bool
    halves: bool
    paired: bool
    native: bool
    block: int
    from_0: bool


def group_operand(weight: GroupWeight, x: Tensor, step: int, scales_first: bool) -> Operand:
    """Return the operand of a weight for tokens' vectors x. step: the inputs that are multiplied at once"""
    assert weight.words.is_contiguous()
    assert weight.numbers == "e2m1" or weight.scales.dtype != torch.uint8 or not scales_first  # they would be raised
    scales, zeros, group = readable(weight.scales), weight.zeros, weight.group
    blocks, block = weight.blocks, weight.block or 0
    assert blocks is None or all(part is None or part.is_contiguous() for part in (blocks, scales, zeros))
    sums = sum_groups(x, group, block) if block and zeros is not None and not scales_first else None
    parts = GroupParts(scales, zeros, *_strides(scales), *_strides(zeros), blocks, sums)
    halves = step == 2 * group and not scales_come_first(weight, x.dtype)
    few_bits = scales.itemsize == 1 and zeros is None
    few_bits = few_bits or (block > 0 and scales.itemsize == 2)
    paired = halves or (step >= 2 * group and (few_bits or is_rounded_once(weight)) and _has_pairs(weight))
    form = GroupForm(
        weight.numbers, group, scales_first, halves, paired, x.is_cuda and x.itemsize == 2, block, weight.has_minima
    )
    return Operand(weight.words, parts, form, _add_products, weight.words.shape[-2], weight.in_features, apart=False)


def _strides(part: Tensor | None) -> tuple[int | None, int | None]:
    if part is None or part.is_contiguous():
        return None, None
    row, group = part.stride()
    return row, group


@triton.jit
def _add_products(x_ptr, words_ptr, product, tile, room, HOW: tl.constexpr, EARLY: tl.constexpr):
    """Return the products of a tile: see linear.plain.add_products."""
    M: tl.constexpr = HOW.block_m
    N: tl.constexpr = HOW.block_n
    FORM: tl.constexpr = HOW.form
    NUMBERS: tl.constexpr = FORM.numbers
    parts, in_features = product.parts, product.in_features
    PER_WORD: tl.constexpr = 32 // bits_of(NUMBERS)
    K: tl.constexpr = HOW.block_k
    HALVES: tl.constexpr = FORM.halves
    SPAN: tl.constexpr = K // 2 if HALVES else K  # inputs of a product, which have a group's scale, or those of several
    n = (tile.rows if HOW.full else tl.where(tile.has_row, tile.rows, 0))[:, None]
    row_words = tl.cdiv(in_features, 4 * PER_WORD) * 4  # so that the compiler knows how rows are aligned
    row_ptrs = words_ptr + n * row_words
    if HOW.fetched > 0:
        line = tile.begin // PER_WORD + tl.arange(0, HOW.fetched) * LINE
        fetch(row_ptrs + tl.minimum(line, row_words - 1)[None, :], EARLY)
    groups = in_features // FORM.group
    if FORM.block > 0:  # the loop loads them a step before, from memory too late
        ahead = tl.minimum(tile.begin // FORM.group + tl.arange(0, LINES_OF_SCALES) * (2 * LINE), groups - 1)[None, :]
        fetch(parts.scales + n * groups + ahead, EARLY)
        if parts.zeros is not None:
            fetch(parts.zeros + n * groups + ahead, EARLY)
    scales = _first_groups(parts.scales, n, parts.scales_row, groups), parts.scales_group, groups
    zeros = None
    # Integers that are loaded a step before would send the numbers through shared memory, but for those of halves.
    WIDE: tl.constexpr = FORM.block > 0 and FORM.scales_first
    HAS_MINIMA: tl.constexpr = FORM.block > 0 and parts.zeros is not None
    HAS_ZEROS: tl.constexpr = parts.zeros is not None and (WIDE or not HAS_MINIMA)
    AHEAD: tl.constexpr = HAS_ZEROS and (HALVES or parts.zeros.dtype.element_ty.is_floating())
    if HAS_ZEROS:
        zeros = _first_groups(parts.zeros, n, parts.zeros_row, groups), parts.zeros_group, groups
    next_scales = _load_groups(scales, tile.begin, FORM, K)
    if AHEAD:
        next_zero = _load_groups(zeros, tile.begin, FORM, K)
    if FORM.block > 0:
        first_block = n * (in_features // FORM.block)
        next_factor = load_factors(parts.blocks, first_block + tile.begin // FORM.block, HAS_MINIMA)
    wait_for_predecessor(EARLY)

    k, word = tl.arange(0, SPAN), tl.arange(0, K // PER_WORD)
    x_mask = tile.exists[:, None]
    x_ptrs = x_ptr + tile.sources.to(tl.int64)[:, None] * in_features + k[None, :]
    acc = tl.zeros([N, M], tl.float32)
    for start in range(tile.begin, tile.stop, K):
        first_word = start // PER_WORD
        if HOW.whole:
            words = tl.load(row_ptrs + (first_word + word)[None, :])
        else:
            is_word = (first_word + word < row_words)[None, :]
            words = tl.load(row_ptrs + (first_word + word)[None, :], mask=is_word, other=0)
        x = _load_inputs(x_ptrs, start, x_mask, in_features, HOW.whole, SPAN)
        if HALVES:
            second_x = _load_inputs(x_ptrs, start + SPAN, x_mask, in_features, HOW.whole, SPAN)
            words, second_words = tl.split(tl.permute(tl.reshape(words, [N, 2, SPAN // PER_WORD]), (0, 2, 1)))
        # Only words and inputs come by copies for which no thread waits. So a step's scales are loaded a step before.
        now, next_scales = next_scales, _load_groups(scales, start + K, FORM, K)
        zero = None
        if AHEAD:
            zero, next_zero = next_zero, _load_groups(zeros, start + K, FORM, K)
        elif HAS_ZEROS:
            zero = _load_groups(zeros, start, FORM, K)
        factor = None
        if FORM.block > 0:
            following = tl.minimum(start + K, in_features - K) // FORM.block
            factor, next_factor = next_factor, load_factors(parts.blocks, first_block + following, HAS_MINIMA)
        SCALE: tl.constexpr = parts.scales.dtype.element_ty
        if HALVES:
            first_scales, second_scales = _halve(now, SCALE)
            second_zero = None
            if parts.zeros is not None:
                zero, second_zero = _halve(zero, parts.zeros.dtype.element_ty)
            acc = _add_group(acc, words, x, first_scales, zero, None, HOW)
            acc = _add_group(acc, second_words, second_x, second_scales, second_zero, None, HOW)
        else:
            if FORM.paired and HAS_ZEROS:
                zero = _apart(zero, parts.zeros.dtype.element_ty)
            if FORM.paired:
                now = _apart(now, SCALE)
            acc = _add_group(acc, words, x, now, zero, factor, HOW)
    if FORM.scales_first and parts.scales.dtype.element_ty == tl.uint8:
        acc *= LOWERED
    if parts.sums is not None:
        acc = _subtract_minima(acc, parts, n, tile, in_features, HOW)
    return acc, acc


@triton.jit
def _subtract_minima(acc, parts, n, tile, in_features, HOW: tl.constexpr):
    """Subtract the products of the groups' minima and the sums of the tokens' vectors, from tile.begin to tile.stop."""
    FORM: tl.constexpr = HOW.form
    PER_BLOCK: tl.constexpr = FORM.block // FORM.group
    BLOCKS: tl.constexpr = SLOTS // PER_BLOCK  # at once
    PLANES: tl.constexpr = planes_of(parts.sums.dtype.element_ty)
    blocks = in_features // FORM.block
    groups = in_features // FORM.group
    slot = tl.arange(0, SLOTS)
    first_block = n * blocks
    sums_ptrs = parts.sums + tile.sources.to(tl.int64)[:, None] * (blocks * PLANES * SLOTS) + slot[None, :]
    begin, end = tile.begin // FORM.block, tile.stop // FORM.block
    for first in range(begin // BLOCKS * BLOCKS, end, BLOCKS):  # see sum_groups for the slots of a block
        group = first * PER_BLOCK + slot
        minima = tl.load(parts.zeros + n * groups + group[None, :], mask=(group < groups)[None, :], other=0.0)
        for number in tl.static_range(BLOCKS):
            block = first + number
            exists = tile.exists & (block >= begin) & (block < end)
            of_block = tl.zeros_like(acc)
            for plane in tl.static_range(PLANES):
                ptrs = sums_ptrs + (block * PLANES + plane) * SLOTS
                sums = tl.load(ptrs, mask=exists[:, None], other=0.0)
                of_block = tl.dot(minima.to(sums.dtype), tl.trans(sums), of_block, input_precision="ieee")
            acc += of_block * -upper_half(load_factors(parts.blocks, first_block + tl.minimum(block, blocks - 1), True))
    return acc


@triton.jit
def _first_groups(ptr, n, stride, groups):
    """Return pointers to the first scale, or zero, of rows n."""
    return ptr + n * (groups if stride is None else stride)


@triton.jit
def _load_inputs(x_ptrs, start, x_mask, in_features, WHOLE: tl.constexpr, SPAN: tl.constexpr):
    """Load the inputs of some tokens from `start` on, [tokens, SPAN]; those past the end are 0."""
    if WHOLE:
        return tl.load(x_ptrs + start, mask=x_mask, other=0.0)
    else:
        exists = (start + tl.arange(0, SPAN) < in_features)[None, :]
        return tl.load(x_ptrs + start, mask=x_mask & exists, other=0.0)


@triton.jit
def _add_group(acc, words, x, scales, zeros, factor, HOW: tl.constexpr):
    """Add the product of some words, [rows, words], with inputs, [tokens, inputs].

    scales, zeros: of their group; or, where scales multiply the numbers, those of several, [rows, groups]
    factor: of their block, [rows, 1]; None: 1
    """
    FORM: tl.constexpr = HOW.form
    NUMBERS: tl.constexpr = FORM.numbers
    SPAN: tl.constexpr = x.shape[1]
    WORDS: tl.constexpr = words.shape[1]
    GROUP: tl.constexpr = SPAN // scales.shape[1]
    HALF: tl.constexpr = GROUP * WORDS == 2 * SPAN  # of what four words have is a group
    HAS_MINIMA: tl.constexpr = zeros is not None and zeros.dtype.is_floating()
    spread_zeros = zeros
    if zeros is not None:
        spread_zeros = _spread(zeros.to(tl.float32 if HAS_MINIMA else tl.int32), WORDS, HALF)
    if FORM.block > 0 and not FORM.scales_first:
        factors = _spread(factors_of(scales, x.dtype, FORM.native), WORDS, HALF)
        weight = unpack_tile(words, None, factors, NUMBERS, x.dtype, FORM.native, False, HOW.form.from_0)
        return acc + tl.dot(weight, tl.trans(x), input_precision="ieee") * lower_half(factor)
    elif FORM.scales_first:
        IS_WIDE: tl.constexpr = HAS_MINIMA or FORM.block > 0 or (scales.dtype == tl.float32 and NUMBERS != "e2m1")
        factors = _spread(widen(scales) if IS_WIDE else factors_of(scales, x.dtype, FORM.native), WORDS, HALF)
        if FORM.block > 0:
            lower = _spread(_repeat(lower_half(factor), scales.shape[1]), WORDS, HALF)
            factors = factors[0] * lower[0], factors[1] * lower[1]
            if HAS_MINIMA:
                upper = _spread(_repeat(upper_half(factor), scales.shape[1]), WORDS, HALF)
                spread_zeros = spread_zeros[0] * upper[0], spread_zeros[1] * upper[1]
        IS_RAISED: tl.constexpr = scales.dtype == tl.uint8
        weight = unpack_tile(words, spread_zeros, factors, NUMBERS, x.dtype, FORM.native, IS_RAISED)
        return tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
    else:
        weight = unpack_tile(words, spread_zeros, None, NUMBERS, x.dtype, FORM.native)
        return acc + tl.dot(weight, tl.trans(x), input_precision="ieee") * widen(scales)


@triton.jit
def _load_groups(of_rows, start, FORM: tl.constexpr, K: tl.constexpr):
    """Load what the groups of a step's inputs have, from `start` on, [rows, groups]; past the end, what others have.

    of_rows: pointers to each row's first, [rows, 1]; the stride of a row's groups, and their number
    If FORM.paired, those of two neighbours are one number, [rows, groups / 2].
    """
    ptrs, stride, groups = of_rows
    GROUP: tl.constexpr = FORM.group
    COUNT: tl.constexpr = max(K // GROUP, 1)
    if FORM.paired:
        BITS: tl.constexpr = ptrs.dtype.element_ty.primitive_bitwidth
        WIDE: tl.constexpr = tl.uint16 if BITS == 8 else tl.uint32 if BITS == 16 else tl.uint64
        return _load_pairs(ptrs, start // GROUP, groups, WIDE, COUNT // 2)
    else:
        group = tl.minimum(start // GROUP + tl.arange(0, COUNT), groups - 1)[None, :]
        return tl.load(ptrs + (group if stride is None else group * stride))


@triton.jit
def _load_pairs(ptrs, first, groups, WIDE: tl.constexpr, COUNT: tl.constexpr):
    """Load COUNT pairs of neighbouring scales; one by one, each thread gets those that it multiplies by."""
    if COUNT == 1:
        return tl.load((ptrs + tl.minimum(first, groups - 2)).to(tl.pointer_type(WIDE)))
    else:
        halves = tl.join(
            _load_pairs(ptrs, first, groups, WIDE, COUNT // 2),
            _load_pairs(ptrs, first + COUNT, groups, WIDE, COUNT // 2),
        )
        return tl.reshape(tl.permute(halves, (0, 2, 1)), [ptrs.shape[0], COUNT])


@triton.jit
def _halve(both, DTYPE: tl.constexpr):
    """Return the two scales, or zeros, of each number that _load_pairs loaded."""
    if DTYPE.primitive_bitwidth == 8:
        first, second = (both & 0xFF).to(tl.uint8), (both >> 8).to(tl.uint8)
    elif DTYPE.primitive_bitwidth == 32:
        first, second = (both & 0xFFFFFFFF).to(tl.uint32), (both >> 32).to(tl.uint32)
    else:
        first, second = (both & 0xFFFF).to(tl.uint16), (both >> 16).to(tl.uint16)
    return first.to(DTYPE, bitcast=True), second.to(DTYPE, bitcast=True)


@triton.jit
def _apart(pairs, DTYPE: tl.constexpr):
    """Return the scales of pairs one by one, [rows, pairs] to [rows, groups]."""
    first, second = _halve(pairs, DTYPE)
    return tl.reshape(tl.join(first, second), [pairs.shape[0], 2 * pairs.shape[1]])


@triton.jit
def _repeat(factor, COUNT: tl.constexpr):
    if COUNT == 1:
        return factor
    else:
        half = _repeat(factor, COUNT // 2)
        return tl.reshape(tl.join(half, half), [factor.shape[0], COUNT])


@triton.jit
def _spread(groups, WORDS: tl.constexpr, HALF: tl.constexpr):
    """Give words what their groups have, [rows, groups] to [rows, words], as unpack_tile takes it.

    That is, for the first and the second halves of the words' blocks. HALF: each is a group
    """
    if HALF:
        first, second = tl.split(tl.reshape(groups, [groups.shape[0], groups.shape[1] // 2, 2]))
        return _to_words(first, WORDS), _to_words(second, WORDS)
    else:
        both = _to_words(groups, WORDS)
        return both, both


@triton.jit
def _to_words(groups, WORDS: tl.constexpr):
    if groups.shape[1] == 1:
        return groups
    else:
        ROWS: tl.constexpr = groups.shape[0]
        COUNT: tl.constexpr = groups.shape[1]
        wide = tl.broadcast_to(groups[:, :, None], [ROWS, COUNT, WORDS // COUNT])
        return tl.reshape(wide, [ROWS, WORDS])
