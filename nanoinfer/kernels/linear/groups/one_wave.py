"""Products of several tokens with a GroupWeight, whose numbers tensor cores get in 16 bits.

The weight is the left operand: a thread takes the words that it needs from shared memory, and the numbers stay in its
registers. Integers are exact in 16 bits. Their scales multiply the float32 sum of each group, and so nothing is rounded
but sums. The products of an e2m1 and a scale of eight bits are exact in bfloat16, and so are multiplied as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.groups import BITS, GroupWeight, scales_are_exact
from nanoinfer.kernels.launch import early_launch, fetch, num_multiprocessors, shared_memory, wait_for_predecessor
from nanoinfer.kernels.linear.activation import Activation, gate_mul_block, gated_row
from nanoinfer.kernels.linear.groups.scales import narrow, readable, widen
from nanoinfer.kernels.unpacking import unpack_tile

BLOCK = 32  # inputs; a whole number of groups.pack's blocks
MOST_GROUPS = 2  # of one step, if sums are scaled: each takes columns of its own in the product
MANY = 64  # tokens; of more, several tiles read the same rows of the weight
MAX_PIECES = {16: 6, 32: 4, 64: 4}  # by the tokens of a tile: the next kernel has to add them
LEAST_INPUTS = 1024  # of a piece
LINE = tl.constexpr(32)  # words that the L2 cache fetches at once
IN_TRITON = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True)
class Cut:
    """How a product is cut: into tiles of tokens by rows of the weight, and each tile into pieces by its inputs.

    lines: so many of each row's words, in LINEs, are fetched before the wait
    """

    block_m: int  # tokens
    block_n: int  # rows of the weight
    pieces: int = 1
    warps: int = 4
    stages: int = 4
    lines: int = 0


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


def find_cut(x: Tensor, weight: GroupWeight, may_split: bool) -> Cut:
    """Return the cut for what can_multiply says (measured on an H100, with groups of 128)."""
    step = step_of(weight, x.dtype)
    assert step is not None
    tokens, weight_rows, multiprocessors = len(x), len(weight.words), num_multiprocessors(x.device)

    def programs(block_m: int, block_n: int) -> int:
        return triton.cdiv(tokens, block_m) * triton.cdiv(weight_rows, block_n)

    if tokens > MANY:
        if may_split:
            pieces = _pieces(weight, step, 2 * multiprocessors // programs(64, 128))
            return Cut(64, 128, pieces, stages=3)
        is_small = tokens <= 2 * MANY or programs(64, 64) <= 3 * multiprocessors
        return Cut(64, 64, stages=3) if is_small else Cut(128, 128, warps=8, stages=5)
    block_m = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
    tiles = programs(block_m, 64)
    if block_m < 64 and tiles > 2 * multiprocessors:
        return Cut(block_m, 128, warps=8, stages=5, lines=2)
    pieces = _pieces(weight, step, min(3 * multiprocessors // tiles, MAX_PIECES[block_m])) if may_split else 1
    together = triton.cdiv(tiles * pieces, multiprocessors)  # on a multiprocessor
    stages = 8 if together == 1 else 4 if together == 2 else 3
    return Cut(block_m, 64, pieces, stages=stages, lines=2 if pieces == 1 else 0)


def _pieces(weight: GroupWeight, step: int, most: int) -> int:
    """Return the largest number of equal pieces, up to `most`, of which none is too short."""
    steps = triton.cdiv(weight.in_features, step)
    most = min(most, steps * step // LEAST_INPUTS)
    return max((pieces for pieces in range(1, most + 1) if steps % pieces == 0), default=1)


def one_wave_triton(
    x: Tensor,
    weight: GroupWeight,
    cut: Cut,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    in_order: bool = False,
) -> Tensor:
    """Compute kernels.linear.dispatch.linear in one launch, cut as `cut` says.

    Several pieces are [pieces, tokens, out_features] float32; the first has the bias.
    in_order: all tiles add up alike, one rounded product after the other
    """
    gated = activation is not None
    assert cut.pieces == 1 or not gated  # the activation needs the whole sum
    assert x.is_contiguous()
    assert weight.words.is_contiguous()
    (tokens, in_features), weight_rows = x.shape, len(weight.words)
    step = step_of(weight, x.dtype)
    assert step is not None
    out_features = weight_rows // 2 if gated else weight_rows
    out_dtype = x.dtype if cut.pieces == 1 else torch.float32
    out = torch.empty((cut.pieces, tokens, out_features), dtype=out_dtype, device=x.device)
    steps = triton.cdiv(in_features, step)
    grid = (triton.cdiv(tokens, cut.block_m) * triton.cdiv(weight_rows, cut.block_n), cut.pieces)
    zeros, scales, is_first = weight.zeros, readable(weight.scales), scales_are_exact(weight, x.dtype)
    groups, bits = max(step // weight.group, 1), BITS[weight.numbers]
    stage = step * (cut.block_m * (1 if is_first else groups) * x.itemsize + cut.block_n * bits // 8)
    room, tile = shared_memory(x.device), cut.block_n * step * x.itemsize  # unpacked, it may go through shared memory
    _group_wave_kernel[grid](
        x,
        weight.words,
        scales,
        zeros,
        weight.factors,
        bias,
        out,
        tokens,
        weight_rows,
        in_features,
        weight.words.shape[1],
        triton.cdiv(steps, cut.pieces),
        *scales.stride(),
        *((None, None) if zeros is None else zeros.stride()),
        NUMBERS=weight.numbers,
        PER_WORD=32 // bits,
        GROUP=weight.group,
        GROUPS=groups,
        SCALES_FIRST=is_first,
        DTYPE=IN_TRITON[x.dtype],
        NATIVE=x.is_cuda,
        WHOLE=in_features % step == 0,
        ACTIVATION=activation,
        BLOCK_M=cut.block_m,
        BLOCK_N=cut.block_n,
        BLOCK_K=step,
        LINES=cut.lines,
        num_warps=cut.warps,
        num_stages=max(min(cut.stages, room // stage, (room - tile) // stage + 1), 1),
        enable_fp_fusion=not in_order,
        **early_launch(x),
    )
    return out if cut.pieces > 1 else out[0]


@triton.jit(do_not_specialize=["tokens"])
def _group_wave_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    zeros_ptr,
    factors_ptr,
    bias_ptr,
    out_ptr,
    tokens,
    weight_rows,
    in_features,
    row_words,
    share,
    scales_row,
    scales_group,
    zeros_row,
    zeros_group,
    NUMBERS: tl.constexpr,
    PER_WORD: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SCALES_FIRST: tl.constexpr,
    DTYPE: tl.constexpr,
    NATIVE: tl.constexpr,
    WHOLE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LINES: tl.constexpr,
    EARLY: tl.constexpr,
):
    GATED: tl.constexpr = ACTIVATION is not None
    ZEROS: tl.constexpr = zeros_ptr is not None
    COLUMNS: tl.constexpr = 1 if SCALES_FIRST else GROUPS  # of the product, for each token
    WORDS: tl.constexpr = BLOCK_K // PER_WORD
    # Programs that run at the same time share the rows of a weight, if these are many.
    token_tiles = tl.cdiv(tokens, BLOCK_M)
    first_token, first_row = tl.program_id(0) % token_tiles * BLOCK_M, tl.program_id(0) // token_tiles * BLOCK_N
    place = first_row + tl.arange(0, BLOCK_N)
    n = tl.minimum(gated_row(place, weight_rows) if GATED else place, weight_rows - 1)
    first = tl.program_id(1) * share
    end = tl.minimum(first + share, tl.cdiv(in_features, BLOCK_K))
    row_ptrs = words_ptr + n.to(tl.int64)[:, None] * row_words
    if LINES > 0:
        line = first * WORDS + tl.arange(0, LINES) * LINE
        fetch(row_ptrs + tl.minimum(line, row_words - 1)[None, :], EARLY)
    groups = in_features // GROUP
    scale_ptrs = scales_ptr + n.to(tl.int64)[:, None] * scales_row
    next_scales = load_groups(scale_ptrs, scales_group, first, groups, GROUP, BLOCK_K)
    if ZEROS:
        zero_ptrs = zeros_ptr + n.to(tl.int64)[:, None] * zeros_row
        next_zeros = load_groups(zero_ptrs, zeros_group, first, groups, GROUP, BLOCK_K)
    wait_for_predecessor(EARLY)

    column, k, word = tl.arange(0, BLOCK_M * COLUMNS), tl.arange(0, BLOCK_K)[None, :], tl.arange(0, WORDS)[None, :]
    m = (first_token + column // COLUMNS)[:, None]
    x_mask = m < tokens
    if COLUMNS > 1:
        x_mask = x_mask & (k // GROUP == (column % COLUMNS)[:, None])
    x_ptrs = x_ptr + m.to(tl.int64) * in_features + k
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in range(first, end):
        if WHOLE:
            x = tl.load(x_ptrs + step * BLOCK_K, mask=x_mask, other=0.0)
            words = tl.load(row_ptrs + (step * WORDS + word))
        else:
            x = tl.load(x_ptrs + step * BLOCK_K, mask=x_mask & (step * BLOCK_K + k < in_features), other=0.0)
            words = tl.load(row_ptrs + (step * WORDS + word), mask=step * WORDS + word < row_words, other=0)
        scales, zeros = next_scales, None
        next_scales = load_groups(scale_ptrs, scales_group, step + 1, groups, GROUP, BLOCK_K)
        if ZEROS:
            zeros = spread(next_zeros.to(tl.int32), WORDS)
            next_zeros = load_groups(zero_ptrs, zeros_group, step + 1, groups, GROUP, BLOCK_K)
        if SCALES_FIRST:
            factors = spread_factors(narrow(scales, DTYPE), WORDS, BLOCK_K // GROUPS)
            acc = tl.dot(unpack_tile(words, zeros, factors, NUMBERS, DTYPE, NATIVE), tl.trans(x), acc)
        else:
            sums = tl.dot(unpack_tile(words, zeros, None, NUMBERS, DTYPE, NATIVE), tl.trans(x))
            if COLUMNS == 1:
                acc += sums * widen(scales)
            else:
                of_groups = tl.reshape(sums, [BLOCK_N, BLOCK_M, COLUMNS]) * widen(scales)[:, None, :]
                acc += tl.sum(of_groups, axis=2)

    if factors_ptr is not None:
        acc *= tl.load(factors_ptr + n)[:, None]
    if bias_ptr is not None:
        biased = tl.where(tl.program_id(1) == 0, weight_rows, 0)  # only the first piece has the bias
        acc += tl.load(bias_ptr + n, mask=place < biased, other=0.0).to(tl.float32)[:, None]
    out = tl.trans(acc.to(out_ptr.dtype.element_ty))
    m = first_token + tl.arange(0, BLOCK_M)
    row, out_features = tl.program_id(1) * tokens + m, weight_rows
    if GATED:
        gate, up = tl.split(tl.reshape(out, [BLOCK_M, BLOCK_N // 2, 2]))
        out, out_features = gate_mul_block(gate, up, ACTIVATION), weight_rows // 2
        place = first_row // 2 + tl.arange(0, BLOCK_N // 2)
    targets = out_ptr + row.to(tl.int64)[:, None] * out_features + place[None, :]
    tl.store(targets, out, mask=(m < tokens)[:, None] & (place < out_features)[None, :])


@triton.jit
def load_groups(row_ptrs, stride, step, groups, GROUP: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load what a step's groups have, [rows, groups of a step]; row_ptrs: [rows, 1]; past the end, the last group's."""
    group = step * BLOCK_K // GROUP + tl.arange(0, BLOCK_K // GROUP if GROUP < BLOCK_K else 1)
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
