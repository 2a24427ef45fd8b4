"""Matrix products so small that the device computes all of their tiles at once, one or two on each multiprocessor.

Such a product takes no longer than a launch and one access to memory. cuBLAS launches only after the kernel before has
ended. If the tiles are too few for the multiprocessors, cuBLAS computes pieces and adds them up in another launch. The
kernel here is launched early and applies the activation. It leaves its pieces to the next kernel, which adds anyway.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import (
    can_launch_early,
    early_launch,
    num_multiprocessors,
    shared_memory,
    wait_for_predecessor,
)
from nanoinfer.kernels.linear.activation import Activation, gate_mul_block

MAX_TOKENS = 256  # more were not measured against cuBLAS
SMALL = 1 << 20  # numbers of a weight; cuBLAS takes longer to launch than such a product takes, however it is cut
LARGE = 8 << 20  # numbers of a weight; the limits for larger ones were measured with 3,584 to 5,120 outputs on an H200
LONG = 2048  # inputs; cuBLAS computes tiles of more than 64 tokens and so many inputs in less time
MIN_BUSY = 0.7  # the share of the multiprocessors that must have a tile
FEW_TOKENS = 16  # up to here, memory has the time, and two tiles on a multiprocessor take no longer than one by one
MOST_TILES = 2  # on a multiprocessor, of few tokens and gates: so many still save the launch of the activation
MAX_PIECES = 8
MAX_STAGES = 5
BLOCK_K = 128


@dataclass(frozen=True)
class Wave:
    """How a product is cut: into tiles of tokens by outputs, and each tile into pieces by its inputs."""

    block_m: int  # tokens
    block_n: int  # outputs; in a gated product, as many gates and as many ups
    grid: tuple[int, int, int]  # tiles of outputs, tiles of tokens, pieces

    @property
    def pieces(self) -> int:
        """The number of pieces; each is computed from an equal share of the inputs."""
        return self.grid[2]


def find_one_wave(x: Tensor, weight: Tensor, gated: bool = False, may_split: bool = False) -> Wave | None:
    """Return the cut for x and weight as in dispatch.linear; None if cuBLAS is faster, or only cuBLAS can do it."""
    in_features = weight.shape[1]
    if len(x) > MAX_TOKENS or not can_launch_early(x.device) or x.itemsize != 2 or in_features % BLOCK_K:
        return None
    out_features = weight.shape[0] // 2 if gated else weight.shape[0]
    multiprocessors = num_multiprocessors(x.device)
    wave = cut(len(x), out_features, in_features, multiprocessors, may_split)
    tiles = math.prod(wave.grid)
    room = multiprocessors * (MOST_TILES if gated and len(x) <= FEW_TOKENS else 1)
    if tiles > room or (tiles < multiprocessors // 3 and weight.numel() > SMALL):
        return None
    if len(x) > 64 and wave.pieces == 1 and in_features >= LONG:
        return None
    # Reading a large weight takes longer than a launch, and cuBLAS leaves fewer multiprocessors idle.
    is_idle = weight.numel() > LARGE and len(x) > FEW_TOKENS and tiles < MIN_BUSY * multiprocessors
    return None if is_idle else wave


def cut(tokens: int, out_features: int, in_features: int, multiprocessors: int, may_split: bool) -> Wave:
    """Cut a product into tiles. If these are few, cut smaller tiles, or pieces if the product may be split."""
    block_m = FEW_TOKENS if tokens <= FEW_TOKENS else 32 if tokens <= 32 else 64
    token_tiles, block_n = triton.cdiv(tokens, block_m), 64
    if block_m == 64 and not may_split and 2 * token_tiles * triton.cdiv(out_features, 64) <= multiprocessors:
        block_n = 32
    output_tiles = triton.cdiv(out_features, block_n)
    most = min(MAX_PIECES, multiprocessors // (token_tiles * output_tiles)) if may_split else 1
    pieces = max((p for p in range(1, most + 1) if in_features % (p * BLOCK_K) == 0), default=1)
    return Wave(block_m, block_n, (output_tiles, token_tiles, pieces))


def one_wave_linear(
    x: Tensor, weight: Tensor, wave: Wave, bias: Tensor | None = None, activation: Activation | None = None
) -> Tensor:
    """Compute the product in one launch, cut as `wave` says.

    x: [tokens, in_features]; weight: [out_features, in_features]; bias: [out_features]
    activation: if given, weight and bias have twice as many rows, gates before ups
    Returns [tokens, out_features], or several pieces, [pieces, tokens, out_features] float32; the first has the bias.
    """
    gated = activation is not None
    assert wave.pieces == 1 or not gated  # the activation needs the whole sum
    (tokens, in_features), out_features = x.shape, weight.shape[0] // 2 if gated else weight.shape[0]
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert in_features % (wave.pieces * BLOCK_K) == 0
    dtype = x.dtype if wave.pieces == 1 else torch.float32
    out = torch.empty((wave.pieces, tokens, out_features), dtype=dtype, device=x.device)
    stage = (wave.block_m + wave.block_n * (2 if gated else 1)) * BLOCK_K * x.itemsize
    neighbours = min(MOST_TILES, triton.cdiv(math.prod(wave.grid), num_multiprocessors(x.device)))
    _one_wave_kernel[wave.grid](
        x,
        weight,
        bias,
        out,
        tokens,
        out_features,
        in_features,
        in_features // wave.pieces,
        BIAS=bias is not None,
        ACTIVATION=activation,
        BLOCK_M=wave.block_m,
        BLOCK_N=wave.block_n,
        BLOCK_K=BLOCK_K,
        num_warps=4,
        num_stages=min(MAX_STAGES, shared_memory(x.device) // (neighbours * stage)),
        **early_launch(x),
    )
    return out if wave.pieces > 1 else out[0]


@triton.jit(do_not_specialize=["tokens"])
def _one_wave_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    tokens,
    out_features,
    in_features,
    share,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    GATED: tl.constexpr = ACTIVATION is not None
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(2) * share + tl.arange(0, BLOCK_K)
    has_token, has_output = (m < tokens)[:, None], (n < out_features)[:, None]
    if BIAS:
        biased = tl.where(tl.program_id(2) == 0, out_features, 0)  # only the first piece has the bias
        bias = tl.load(bias_ptr + n, mask=n < biased, other=0.0).to(tl.float32)
        if GATED:
            up_bias = tl.load(bias_ptr + out_features + n, mask=n < out_features, other=0.0).to(tl.float32)
    wait_for_predecessor(EARLY)

    # Tensor cores need at least 64 rows in the left matrix: with fewer tokens, the weight is the left one.
    TOKENS_LEFT: tl.constexpr = BLOCK_M >= 64
    acc = tl.zeros([BLOCK_M, BLOCK_N] if TOKENS_LEFT else [BLOCK_N, BLOCK_M], tl.float32)
    up_acc = tl.zeros([BLOCK_M, BLOCK_N] if TOKENS_LEFT else [BLOCK_N, BLOCK_M], tl.float32)
    x_ptrs = x_ptr + m[:, None] * in_features + k[None, :]
    weight_ptrs = weight_ptr + n[:, None] * in_features + k[None, :]
    for start in range(0, share, BLOCK_K):
        x = tl.load(x_ptrs + start, mask=has_token, other=0.0)
        weight = tl.load(weight_ptrs + start, mask=has_output, other=0.0)
        acc = add_product(acc, x, weight, TOKENS_LEFT)
        if GATED:
            up_weight = tl.load(weight_ptrs + start + out_features * in_features, mask=has_output, other=0.0)
            up_acc = add_product(up_acc, x, up_weight, TOKENS_LEFT)

    if BIAS:
        acc += bias[None, :] if TOKENS_LEFT else bias[:, None]
    out = acc.to(out_ptr.dtype.element_ty)
    if GATED:
        if BIAS:
            up_acc += up_bias[None, :] if TOKENS_LEFT else up_bias[:, None]
        out = gate_mul_block(out, up_acc.to(out.dtype), ACTIVATION)
    if not TOKENS_LEFT:
        out = tl.trans(out)
    targets = out_ptr + (tl.program_id(2) * tokens + m[:, None]) * out_features + n[None, :]
    tl.store(targets, out, mask=has_token & (n < out_features)[None, :])


@triton.jit
def add_product(acc, x, weight, TOKENS_LEFT: tl.constexpr):
    """Add x @ weight.T to acc, or if not TOKENS_LEFT, weight @ x.T; float32 stays float32."""
    return (
        tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
        if TOKENS_LEFT
        else tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
    )
