"""The products of tiles of choices with the rows of their experts' GroupWeights, in one launch.

The weight is the left matrix of every product: a tensor core takes the left one from the registers in which its words
become numbers. So those never pass through the shared memory, which has little to spare at a quarter of the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.experts.operand import GroupOperand
from nanoinfer.kernels.groups import GroupWeight, Numbers
from nanoinfer.kernels.launch import wait_for_predecessor
from nanoinfer.kernels.linear.groups.scales import narrow, readable, widen
from nanoinfer.kernels.linear.operand import Operand
from nanoinfer.kernels.linear.plain import add_product
from nanoinfer.kernels.linear.tiles import TileConfig, stages_that_fit
from nanoinfer.kernels.unpacking import unpack_tile


class ExpertParts(NamedTuple):
    """What the kernel reads of experts' GroupWeights, beside their words. quads: four words in a row"""

    scales: Tensor
    zeros: Tensor | None
    quads: int


@dataclass(frozen=True)
class ExpertForm:
    """What the kernel is compiled for; numbers, group: of groups.GroupWeight

    exact, paired: GroupOperand's scales_are_exact and scales_are_paired; native: tokens have 16 bits, on a GPU
    Unless exact, a block has one group, or few that are smaller than those of groups.pack.
    """

    numbers: Numbers
    group: int
    exact: bool
    paired: bool
    native: bool


def group_operand_and_config(weight: GroupWeight, x: Tensor, block_m: int) -> tuple[Operand, TileConfig]:
    """Return the operand of experts' weights for vectors x, and the fastest configuration for tiles of so many choices.

    Where sums are scaled, all cuts have the same blocks of inputs, and so one order.
    """
    known = GroupOperand.of(weight, x.dtype)
    exact = known.scales_are_exact
    native = x.is_cuda and x.itemsize == 2
    form = ExpertForm(weight.numbers, weight.group, exact, known.scales_are_paired, native)
    parts = ExpertParts(readable(weight.scales), weight.zeros, known.quads)
    is_large = block_m == 128
    block_n = 128 if is_large else 64  # sixteen rows for each warp, and so none makes numbers that another makes
    block_k = known.inputs_at_once(64 if x.itemsize == 4 or (exact and block_m >= 64) else 128)
    stage = block_k * (block_m * x.itemsize + block_n * known.bits // 8)
    stages = stages_that_fit(3 if block_m >= 64 else 4, stage, x.device)
    config = TileConfig(block_m, block_n, block_k, 1, block_n // 16, stages, persistent=is_large)
    _, rows, in_features = known.shape
    return Operand(weight.words, parts, form, _add_products, rows, in_features, apart=False), config


@triton.jit
def _add_products(x_ptr, words_ptr, product, tile, room, HOW: tl.constexpr, EARLY: tl.constexpr):
    """Return the products of a tile: see linear.plain.add_products."""
    M: tl.constexpr = HOW.block_m
    N: tl.constexpr = HOW.block_n
    K: tl.constexpr = HOW.block_k
    FORM: tl.constexpr = HOW.form
    NUMBERS: tl.constexpr = FORM.numbers
    GROUP: tl.constexpr = FORM.group
    PAIRED: tl.constexpr = FORM.paired
    parts, row, has_row, in_features = product.parts, tile.rows, tile.has_row, product.in_features
    COUNT: tl.constexpr = max(K // GROUP, 1)
    SCALE: tl.constexpr = parts.scales.dtype.element_ty
    EVEN: tl.constexpr = HOW.whole and HOW.full
    wait_for_predecessor(EARLY)
    k = tl.arange(0, K)
    groups = in_features // GROUP
    x_ptrs = x_ptr + tile.sources.to(tl.int64)[:, None] * in_features
    acc = tl.zeros([N, M], tl.float32)
    scales = _load_groups(parts.scales, row, has_row, 0, groups, COUNT, PAIRED)
    for start in range(0, in_features, K):
        x_mask = tile.exists[:, None] if EVEN else tile.exists[:, None] & (k < in_features - start)[None, :]
        x = tl.load(x_ptrs + (start + k)[None, :], mask=x_mask, other=0.0)
        words = _load_words(words_ptr, row, has_row, start, parts.quads, NUMBERS, EVEN, K)
        # Only words come by copies for which no thread waits. So a block's scales are loaded a block before.
        first = (start + K) // GROUP
        next_scales = _load_groups(parts.scales, row, has_row, first, groups, COUNT, PAIRED)
        zeros = None
        if parts.zeros is not None:  # loaded a block before, they would send the numbers through shared memory
            zeros = _load_groups(parts.zeros, row, has_row, start // GROUP, groups, COUNT, False)
        acc = _add_product(acc, x, words, scales, zeros, SCALE, NUMBERS, GROUP, FORM.exact, FORM.native)
        scales = next_scales
    return acc, acc


@triton.jit
def _load_words(
    words_ptr, row, has_row, start, quads, NUMBERS: tl.constexpr, EVEN: tl.constexpr, BLOCK_K: tl.constexpr
):
    PER_WORD: tl.constexpr = 4 if NUMBERS == "int8" else 8
    word = start // PER_WORD + tl.arange(0, BLOCK_K // PER_WORD)
    ptrs = words_ptr + row[:, None] * (quads * 4) + word[None, :]
    return tl.load(ptrs) if EVEN else tl.load(ptrs, mask=has_row[:, None] & (word < quads * 4)[None, :], other=0)


@triton.jit
def _load_groups(ptr, row, has_row, first, groups, COUNT: tl.constexpr, PAIRED: tl.constexpr):
    """Load the scales, or the zeros, of COUNT neighbouring groups of each row, as they are stored, [rows, COUNT].

    If PAIRED, two scales are an uint16, [rows, COUNT / 2].
    """
    if PAIRED:
        return _load_pairs(ptr, row, has_row, first, groups, COUNT // 2)
    else:
        group = first + tl.arange(0, COUNT)
        mask = has_row[:, None] & (group < groups)[None, :]
        other: tl.constexpr = 0 if ptr.dtype.element_ty == tl.uint8 else 0.0
        return tl.load(ptr + row[:, None] * groups + group[None, :], mask=mask, other=other)


@triton.jit
def _load_pairs(scales_ptr, row, has_row, first, groups, COUNT: tl.constexpr):
    """Load COUNT pairs of neighbouring scales; one by one, each thread gets those that it multiplies by."""
    if COUNT == 1:
        group = first + tl.arange(0, 1)
        ptrs = (scales_ptr + row[:, None] * groups + group[None, :]).to(tl.pointer_type(tl.uint16))
        return tl.load(ptrs, mask=has_row[:, None] & (group < groups)[None, :], other=0)
    else:
        halves = tl.join(
            _load_pairs(scales_ptr, row, has_row, first, groups, COUNT // 2),
            _load_pairs(scales_ptr, row, has_row, first + COUNT, groups, COUNT // 2),
        )
        return tl.reshape(tl.permute(halves, (0, 2, 1)), [row.shape[0], COUNT])


@triton.jit
def _add_product(
    acc,
    x,
    words,
    scales,
    zeros,
    SCALE: tl.constexpr,
    NUMBERS: tl.constexpr,
    GROUP: tl.constexpr,
    EXACT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    ROWS: tl.constexpr = words.shape[0]
    BLOCK_K: tl.constexpr = x.shape[1]
    if scales.dtype == tl.uint16:
        pairs = tl.join(scales & 0xFF, scales >> 8).to(tl.uint8)
        scales = tl.reshape(pairs, [ROWS, BLOCK_K // GROUP]).to(SCALE, bitcast=True)
    if EXACT:
        numbers = tl.reshape(unpack_tile(words, None, None, NUMBERS, x.dtype, NATIVE), [ROWS, BLOCK_K // GROUP, GROUP])
        return add_product(acc, x, tl.reshape(numbers * narrow(scales, x.dtype)[:, :, None], [ROWS, BLOCK_K]), False)
    elif BLOCK_K <= GROUP:
        weight = unpack_tile(words, zeros if zeros is None else zeros.to(tl.int32), None, NUMBERS, x.dtype, NATIVE)
        return acc + tl.dot(weight, tl.trans(x), input_precision="ieee") * widen(scales)
    else:
        group = tl.arange(0, BLOCK_K // GROUP)
        for part in tl.static_range(BLOCK_K // GROUP):
            scale = tl.sum(tl.where((group == part)[None, :], widen(scales), 0.0), axis=1)[:, None]
            zero = None
            if zeros is not None:
                zero = tl.sum(tl.where((group == part)[None, :], zeros.to(tl.int32), 0), axis=1)[:, None]
            weight = unpack_tile(words, zero, None, NUMBERS, x.dtype, NATIVE)
            own = tl.where((tl.arange(0, BLOCK_K) // GROUP == part)[None, :], x, 0.0)
            acc += tl.dot(weight, tl.trans(own), input_precision="ieee") * scale
        return acc
