"""How a tile of choices is multiplied with the rows of an expert's GroupWeight.

The weight is the left matrix of every product: a tensor core takes the left one from the registers in which its words
become numbers. So those never pass through the shared memory, which has little to spare at a quarter of the bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nanoinfer.kernels.linear.groups.scales import narrow, widen
from nanoinfer.kernels.linear.one_wave import add_product
from nanoinfer.kernels.unpacking import unpack_tile


@triton.jit
def multiply_groups(
    x_ptrs,
    exists,
    words_ptr,
    scales_ptr,
    zeros_ptr,
    row,
    has_output,
    out_features,
    in_features,
    quads,
    NUMBERS: tl.constexpr,
    GROUP: tl.constexpr,
    EXACT: tl.constexpr,
    PAIRED: tl.constexpr,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the products of rows of the weights with vectors, [rows, vectors] float32, and if GATED those of the ups.

    x_ptrs: of each vector, [vectors, 1]; row: among those of all experts, int64; an up's is out_features further
    quads: those of four words in a row
    EXACT: Operand.scales_are_exact; else a block has one group, or few that are smaller than those of groups.pack
    PAIRED: a row's groups are even in number, and so are a block's; each scale is a byte
    """
    COUNT: tl.constexpr = max(BLOCK_K // GROUP, 1)
    SCALE: tl.constexpr = scales_ptr.dtype.element_ty
    ZEROS: tl.constexpr = zeros_ptr is not None
    k = tl.arange(0, BLOCK_K)
    groups = in_features // GROUP
    up_row = row + out_features
    acc = tl.zeros([row.shape[0], exists.shape[0]], tl.float32)
    up_acc = tl.zeros([row.shape[0], exists.shape[0]], tl.float32)
    scales = _load_groups(scales_ptr, row, has_output, 0, groups, COUNT, PAIRED)
    zeros, up_zeros = None, None
    if GATED:
        up_scales = _load_groups(scales_ptr, up_row, has_output, 0, groups, COUNT, PAIRED)
    if ZEROS:
        zeros = _load_groups(zeros_ptr, row, has_output, 0, groups, COUNT, False)
        if GATED:
            up_zeros = _load_groups(zeros_ptr, up_row, has_output, 0, groups, COUNT, False)
    for start in range(0, in_features, BLOCK_K):
        x_mask = exists[:, None] if EVEN else exists[:, None] & (k < in_features - start)[None, :]
        x = tl.load(x_ptrs + (start + k)[None, :], mask=x_mask, other=0.0)
        # Only words come by copies for which no thread waits. So a block's scales are loaded a block before.
        first = (start + BLOCK_K) // GROUP
        next_scales = _load_groups(scales_ptr, row, has_output, first, groups, COUNT, PAIRED)
        if GATED:
            next_up_scales = _load_groups(scales_ptr, up_row, has_output, first, groups, COUNT, PAIRED)
        if ZEROS:
            next_zeros = _load_groups(zeros_ptr, row, has_output, first, groups, COUNT, False)
            if GATED:
                next_up_zeros = _load_groups(zeros_ptr, up_row, has_output, first, groups, COUNT, False)
        words = _load_words(words_ptr, row, has_output, start, quads, NUMBERS, EVEN, BLOCK_K)
        acc = _add_product(acc, x, words, scales, zeros, SCALE, NUMBERS, GROUP, EXACT, NATIVE)
        scales = next_scales
        if GATED:
            words = _load_words(words_ptr, up_row, has_output, start, quads, NUMBERS, EVEN, BLOCK_K)
            up_acc = _add_product(up_acc, x, words, up_scales, up_zeros, SCALE, NUMBERS, GROUP, EXACT, NATIVE)
            up_scales = next_up_scales
        if ZEROS:
            zeros = next_zeros
            if GATED:
                up_zeros = next_up_zeros
    return acc, up_acc


@triton.jit
def _load_words(
    words_ptr, row, has_output, start, quads, NUMBERS: tl.constexpr, EVEN: tl.constexpr, BLOCK_K: tl.constexpr
):
    PER_WORD: tl.constexpr = 4 if NUMBERS == "int8" else 8
    word = start // PER_WORD + tl.arange(0, BLOCK_K // PER_WORD)
    ptrs = words_ptr + row[:, None] * (quads * 4) + word[None, :]
    return tl.load(ptrs) if EVEN else tl.load(ptrs, mask=has_output[:, None] & (word < quads * 4)[None, :], other=0)


@triton.jit
def _load_groups(ptr, row, has_output, first, groups, COUNT: tl.constexpr, PAIRED: tl.constexpr):
    """Load the scales, or the zeros, of COUNT neighbouring groups of each row, as they are stored, [rows, COUNT].

    If PAIRED, two scales are an uint16, [rows, COUNT / 2].
    """
    if PAIRED:
        return _load_pairs(ptr, row, has_output, first, groups, COUNT // 2)
    else:
        group = first + tl.arange(0, COUNT)
        mask = has_output[:, None] & (group < groups)[None, :]
        other: tl.constexpr = 0 if ptr.dtype.element_ty == tl.uint8 else 0.0
        return tl.load(ptr + row[:, None] * groups + group[None, :], mask=mask, other=other)


@triton.jit
def _load_pairs(scales_ptr, row, has_output, first, groups, COUNT: tl.constexpr):
    """Load COUNT pairs of neighbouring scales; one by one, each thread gets those that it multiplies by."""
    if COUNT == 1:
        group = first + tl.arange(0, 1)
        ptrs = (scales_ptr + row[:, None] * groups + group[None, :]).to(tl.pointer_type(tl.uint16))
        return tl.load(ptrs, mask=has_output[:, None] & (group < groups)[None, :], other=0)
    else:
        halves = tl.join(
            _load_pairs(scales_ptr, row, has_output, first, groups, COUNT // 2),
            _load_pairs(scales_ptr, row, has_output, first + COUNT, groups, COUNT // 2),
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
