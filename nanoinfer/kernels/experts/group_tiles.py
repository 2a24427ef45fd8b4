"""The products of tiles of choices with the rows of their experts' GroupWeights, in one launch.

The weight is the left matrix of every product: a tensor core takes the left one from the registers in which its words
become numbers. So those never pass through the shared memory, which has little to spare at a quarter of the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.adapters.experts import add_added
from nanoinfer.kernels.experts.operand import GroupOperand
from nanoinfer.kernels.experts.route import Routes
from nanoinfer.kernels.groups import GroupWeight
from nanoinfer.kernels.launch import early_launch, num_multiprocessors, shared_memory, wait_for_predecessor
from nanoinfer.kernels.linear.activation import Activation, gate_mul_block, gated_row
from nanoinfer.kernels.linear.groups.scales import narrow, readable, widen
from nanoinfer.kernels.linear.one_wave import add_product
from nanoinfer.kernels.sorting import Groups
from nanoinfer.kernels.unpacking import unpack_tile


@dataclass(frozen=True)
class GroupTiling:
    """How a product is cut: as products.Tiling says, but that block_n are rows of the weight: gates as well as ups."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    persistent: bool

    @classmethod
    def of(cls, block_m: int, operand: GroupOperand, itemsize: int) -> GroupTiling:
        """Return the fastest. Where sums are scaled, all have the same blocks of inputs, and so one order.

        itemsize: bytes of a token's numbers. Float32 also has the weight's in the shared memory
        """
        is_large, exact = block_m == 128, operand.scales_are_exact
        block_n = 128 if is_large else 64  # sixteen rows for each warp, and so none makes numbers that another makes
        block_k = operand.inputs_at_once(64 if itemsize == 4 or (exact and block_m >= 64) else 128)
        return cls(block_m, block_n, block_k, block_n // 16, 3 if block_m >= 64 else 4, persistent=is_large)


def multiply_group_tiles(
    x: Tensor,
    weight: GroupWeight,
    bias: Tensor | None,
    added: Tensor | None,
    out: Tensor,
    groups: Groups,
    block_m: int,
    routes: Routes,
    activation: Activation | None,
    in_order: bool,
) -> None:
    """Multiply each choice's input with its expert's weight. The arguments are as for the other weights' products."""
    operand = GroupOperand.of(weight, x.dtype)
    (tokens, used), (_, rows, in_features) = routes.experts.shape, operand.shape
    assert x.is_contiguous()
    tiling = GroupTiling.of(block_m, operand, x.itemsize)
    stage = tiling.block_k * (tiling.block_m * x.itemsize + tiling.block_n * operand.bits // 8)
    items = triton.cdiv(rows, tiling.block_n) * len(groups.tiles)
    programs = min(items, num_multiprocessors(out.device)) if tiling.persistent else items
    _group_tiles_kernel[(programs,)](
        x,
        weight.words,
        readable(weight.scales),
        weight.zeros,
        weight.factors,
        bias,
        added,
        out,
        routes.weights,
        *groups,
        tokens,
        rows,
        in_features,
        operand.quads,
        items,
        USED=used,
        ACTIVATION=activation,
        NUMBERS=weight.numbers,
        GROUP=weight.group,
        EXACT=operand.scales_are_exact,
        PAIRED=operand.scales_are_paired,
        NATIVE=x.is_cuda and x.itemsize == 2,
        EVEN=in_features % tiling.block_k == rows % tiling.block_n == 0,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        num_warps=tiling.warps,
        num_stages=max(1, min(tiling.stages, shared_memory(out.device) // stage)),
        enable_fp_fusion=not in_order,
        **early_launch(out),
    )


@triton.jit(do_not_specialize=["tokens", "items"])
def _group_tiles_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    zeros_ptr,
    factors_ptr,
    bias_ptr,
    added_ptr,
    out_ptr,
    choice_weights_ptr,
    choices_ptr,
    tiles_ptr,
    tokens,
    weight_rows,
    in_features,
    quads,
    items,
    USED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NUMBERS: tl.constexpr,
    GROUP: tl.constexpr,
    EXACT: tl.constexpr,
    PAIRED: tl.constexpr,
    NATIVE: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    GATED: tl.constexpr = ACTIVATION is not None
    wait_for_predecessor(EARLY)
    blocks = tl.cdiv(weight_rows, BLOCK_N)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        tile_ptr = tiles_ptr + item // blocks * 3
        expert, first, end = tl.load(tile_ptr), tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)
        if first < end:
            position = first + tl.arange(0, BLOCK_M)
            exists = position < end
            source = tl.load(choices_ptr + position, mask=exists, other=0) // USED if GATED else position
            place = item % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
            has_row = place < weight_rows
            n = gated_row(place, weight_rows) if GATED else place
            row = expert.to(tl.int64) * weight_rows + n
            if factors_ptr is not None:
                factors = tl.load(factors_ptr + row, mask=has_row, other=0.0)
            if bias_ptr is not None:
                bias = tl.load(bias_ptr + row, mask=has_row, other=0.0).to(tl.float32)
            acc = _multiply(
                x_ptr + source.to(tl.int64)[:, None] * in_features,
                exists,
                words_ptr,
                scales_ptr,
                zeros_ptr,
                row,
                has_row,
                in_features,
                quads,
                NUMBERS,
                GROUP,
                EXACT,
                PAIRED,
                EVEN,
                NATIVE,
                BLOCK_K,
            )
            if factors_ptr is not None:
                acc *= factors[:, None]
            if bias_ptr is not None:
                acc += bias[:, None]
            if added_ptr is not None:
                choice = tl.load(choices_ptr + position, mask=exists, other=0)  # late, as registers are short before
                acc = add_added(acc, added_ptr, choice, exists, n, has_row, weight_rows, False)
            if GATED:
                both = tl.reshape(tl.trans(acc.to(out_ptr.dtype.element_ty)), [BLOCK_M, BLOCK_N // 2, 2])
                gate, up = tl.split(both)
                out = gate_mul_block(gate, up, ACTIVATION)
                target, outputs = position, weight_rows // 2
                column = item % blocks * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
            else:
                choice = tl.load(choices_ptr + position, mask=exists, other=0)
                acc *= tl.load(choice_weights_ptr + choice, mask=exists, other=0.0)[None, :]
                out = tl.trans(acc.to(out_ptr.dtype.element_ty))
                target, outputs, column = choice % USED * tokens + choice // USED, weight_rows, place
            targets = out_ptr + target.to(tl.int64)[:, None] * outputs + column[None, :]
            tl.store(targets, out, mask=exists[:, None] & (column < outputs)[None, :])


@triton.jit
def _multiply(
    x_ptrs,
    exists,
    words_ptr,
    scales_ptr,
    zeros_ptr,
    row,
    has_row,
    in_features,
    quads,
    NUMBERS: tl.constexpr,
    GROUP: tl.constexpr,
    EXACT: tl.constexpr,
    PAIRED: tl.constexpr,
    EVEN: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the products of rows of the weight with vectors, [rows, vectors] float32, but for the rows' factors.

    x_ptrs: of each vector, [vectors, 1]; row: among those of all experts
    EXACT: GroupOperand.scales_are_exact; else a block has one group, or few that are smaller than those of groups.pack
    PAIRED: a row's groups are even in number, and so are a block's; each scale is a byte
    """
    COUNT: tl.constexpr = max(BLOCK_K // GROUP, 1)
    SCALE: tl.constexpr = scales_ptr.dtype.element_ty
    ZEROS: tl.constexpr = zeros_ptr is not None
    k = tl.arange(0, BLOCK_K)
    groups = in_features // GROUP
    acc = tl.zeros([row.shape[0], exists.shape[0]], tl.float32)
    scales = _load_groups(scales_ptr, row, has_row, 0, groups, COUNT, PAIRED)
    zeros = None
    if ZEROS:
        zeros = _load_groups(zeros_ptr, row, has_row, 0, groups, COUNT, False)
    for start in range(0, in_features, BLOCK_K):
        x_mask = exists[:, None] if EVEN else exists[:, None] & (k < in_features - start)[None, :]
        x = tl.load(x_ptrs + (start + k)[None, :], mask=x_mask, other=0.0)
        words = _load_words(words_ptr, row, has_row, start, quads, NUMBERS, EVEN, BLOCK_K)
        # Only words come by copies for which no thread waits. So a block's scales are loaded a block before.
        first = (start + BLOCK_K) // GROUP
        next_scales = _load_groups(scales_ptr, row, has_row, first, groups, COUNT, PAIRED)
        if ZEROS:
            next_zeros = _load_groups(zeros_ptr, row, has_row, first, groups, COUNT, False)
        acc = _add_product(acc, x, words, scales, zeros, SCALE, NUMBERS, GROUP, EXACT, NATIVE)
        scales = next_scales
        if ZEROS:
            zeros = next_zeros
    return acc


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
