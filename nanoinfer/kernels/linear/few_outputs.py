"""Products of few outputs and many tokens in captured steps: those behind attention, and at the end of an MLP.

cuBLAS leaves many multiprocessors idle with these, or adds up pieces in another launch. Here a tile has all tokens or
half of them, and pieces of its inputs are as many as give each multiprocessor a program. The next kernel adds up the
pieces, for it adds anyway. Tensor-memory copies fetch what a tile multiplies. Their descriptors cost the host 30 to 60
µs a launch, and so only launches in graphs have this kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nanoinfer.kernels.launch import (
    can_copy,
    cdiv,
    is_measured,
    is_recording,
    launch_options,
    num_multiprocessors,
    shared_memory,
    wait_for_predecessor,
)

LEAST_TOKENS, MOST_TOKENS = 65, 256  # with fewer, one_wave is as fast; with more, cuBLAS has tiles for all
TILES = (  # tiles of tokens, outputs of a tile, and its tokens: powers of two, or sums of two
    (2, 64, (64, 80, 96, 128)),
    (1, 64, (80, 96, 144, 160)),
    (2, 128, (64, 96, 128)),
)
MOST_LACKING = 15  # tokens of a tile; where more lack, copies take longer than those of full tiles
LONG = 6144  # inputs, from which on the last tiles of the list pay, and 80% of the multiprocessors are enough
SMALL, MOST_INPUTS = (2, 64), 4096  # of a piece in the first tiles; of more, larger ones read less
LEAST_INPUTS = 512  # of a piece
MAX_PIECES = 4
MAX_STAGES = 8
SPARE_BYTES = 7 << 10  # of shared memory, for barriers, and for the kernels before and after
WARPS = 4


@dataclass(frozen=True)
class Tiling:
    """How a product is cut: into tiles of tokens by outputs, and each tile into pieces by its inputs."""

    tokens: int  # of a tile
    outputs: int
    grid: tuple[int, int, int]  # tiles of tokens, tiles of outputs, pieces

    @property
    def pieces(self) -> int:
        """The number of pieces; each is computed from about as many inputs."""
        return self.grid[2]


def find_tiling(x: Tensor, weight: Tensor) -> Tiling | None:
    """Return the cut for a product that may be split, as in dispatch.linear; None if other kernels are to compute it.

    Where no norm adds up pieces, and overlaps with the product's end, cuBLAS is as fast.
    """
    out_features, in_features = weight.shape
    if not LEAST_TOKENS <= len(x) <= MOST_TOKENS or not is_recording() or not is_measured(x.device):
        return None
    if x.itemsize != 2 or not can_copy(x, weight):
        return None
    return tile(len(x), out_features, in_features, num_multiprocessors(x.device))


def tile(tokens: int, out_features: int, in_features: int, multiprocessors: int) -> Tiling | None:
    """Cut a product as was fast on an H200; None if too many multiprocessors would have no program."""
    least_busy = (0.8 if in_features >= LONG else 0.9) * multiprocessors
    for token_tiles, outputs, widths in TILES:
        width = next((width for width in widths if width * token_tiles >= tokens), None)
        if width is None or width - tokens > MOST_LACKING or (outputs == 128 and in_features < LONG):
            continue
        output_tiles = cdiv(out_features, outputs)
        tiles = token_tiles * output_tiles
        pieces = min(multiprocessors // tiles, in_features // LEAST_INPUTS, MAX_PIECES)
        if (token_tiles, outputs) == SMALL and in_features > MOST_INPUTS * pieces:
            continue
        if tiles * pieces >= least_busy:
            return Tiling(width, outputs, (token_tiles, output_tiles, pieces))
    return None


def few_outputs_linear(x: Tensor, weight: Tensor, tiling: Tiling, bias: Tensor | None = None) -> Tensor:
    """Compute the product in one launch, cut as `tiling` says.

    x: [tokens, in_features]; weight: [out_features, in_features]; bias: [out_features]
    Returns [tokens, out_features], or several pieces, [pieces, tokens, out_features] float32; the first has the bias.
    """
    (tokens, in_features), out_features = x.shape, len(weight)
    assert x.is_contiguous()
    assert weight.is_contiguous()
    dtype = x.dtype if tiling.pieces == 1 else torch.float32
    out = torch.empty((tiling.pieces, tokens, out_features), dtype=dtype, device=x.device)
    first, second = parts_of(tiling.tokens)
    block_k = 128 if tiling.tokens <= 128 and tiling.outputs == 64 else 64  # of four stages and more
    stage = (tiling.tokens + tiling.outputs) * block_k * x.itemsize
    _few_outputs_kernel[tiling.grid](
        TensorDescriptor.from_tensor(x, [first, block_k]),
        TensorDescriptor.from_tensor(x, [second or first, block_k]),
        TensorDescriptor.from_tensor(weight, [tiling.outputs, block_k]),
        bias,
        out,
        tokens,
        out_features,
        in_features,
        BIAS=bias is not None,
        FIRST=first,
        SECOND=second,
        BLOCK_N=tiling.outputs,
        BLOCK_K=block_k,
        num_warps=WARPS,
        num_stages=min(MAX_STAGES, (shared_memory(x.device) - SPARE_BYTES) // stage),
        **launch_options(x),
    )
    return out if tiling.pieces > 1 else out[0]


def parts_of(width: int) -> tuple[int, int]:
    """Return the powers of two whose sum is a width, of which Triton makes blocks; the second may be 0."""
    first = 1 << (width.bit_length() - 1)
    return first, width - first


@triton.jit(do_not_specialize=["tokens"])
def _few_outputs_kernel(
    first_source,
    second_source,
    weight_source,
    bias_ptr,
    out_ptr,
    tokens,
    out_features,
    in_features,
    BIAS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    # Tiles of the same outputs are neighbours, and share the weight's rows. The last tile of tokens ends with the last
    # one, and computes some that the tile before it computes, too: tiles that lack tokens would take longer.
    token = tl.maximum(tl.minimum(tl.program_id(0) * (FIRST + SECOND), tokens - FIRST - SECOND), 0)
    output = tl.program_id(1) * BLOCK_N
    piece, pieces = tl.program_id(2), tl.num_programs(2)
    blocks = tl.cdiv(in_features, BLOCK_K)
    begin, end = piece * blocks // pieces, (piece + 1) * blocks // pieces
    n = output + tl.arange(0, BLOCK_N)
    if BIAS:
        biased = tl.where(piece == 0, out_features, 0)  # only the first piece has the bias
        bias = tl.load(bias_ptr + n, mask=n < biased, other=0.0).to(tl.float32)[:, None]
    wait_for_predecessor(EARLY)

    # The weight is the left matrix, so that it can have few rows beside any number of tokens.
    acc = tl.zeros([BLOCK_N, FIRST], tl.float32)
    if SECOND:
        second_acc = tl.zeros([BLOCK_N, SECOND], tl.float32)
    for k in range(begin * BLOCK_K, end * BLOCK_K, BLOCK_K):
        weight = weight_source.load([output, k])
        acc = tl.dot(weight, tl.trans(first_source.load([token, k])), acc)
        if SECOND:
            second_acc = tl.dot(weight, tl.trans(second_source.load([token + FIRST, k])), second_acc)

    if BIAS:
        acc += bias
    _store(out_ptr, acc, piece, token + tl.arange(0, FIRST), n, tokens, out_features)
    if SECOND:
        if BIAS:
            second_acc += bias
        _store(out_ptr, second_acc, piece, token + FIRST + tl.arange(0, SECOND), n, tokens, out_features)


@triton.jit
def _store(out_ptr, acc, piece, m, n, tokens, out_features):
    """Store [outputs, tokens] into [pieces, tokens, out_features]."""
    targets = out_ptr + (piece * tokens + m).to(tl.int64)[:, None] * out_features + n[None, :]
    tl.store(
        targets, tl.trans(acc).to(out_ptr.dtype.element_ty), mask=(m < tokens)[:, None] & (n < out_features)[None, :]
    )
