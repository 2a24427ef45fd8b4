"""Matrix products so small that the device computes all of their tiles at once, one or two on each multiprocessor.

Such a product takes no longer than a launch and one access to memory. cuBLAS launches only after the kernel before has
ended. If the tiles are too few for the multiprocessors, cuBLAS computes pieces and adds them up in another launch. The
kernel here is launched early and applies the activation. It leaves its pieces to the next kernel, which adds anyway.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from nanoinfer.kernels.launch import can_launch_early, cdiv, num_multiprocessors
from nanoinfer.kernels.linear.activation import Activation
from nanoinfer.kernels.linear.operands.plain import plain_operand
from nanoinfer.kernels.linear.tiles import Epilogue, TileConfig, multiply_tiles, stages_that_fit

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


def find_one_wave(x: Tensor, weight: Tensor, gated: bool = False, may_split: bool = False) -> TileConfig | None:
    """Return how to cut a product, as in dispatch.linear; None if cuBLAS is faster, or only cuBLAS can do it."""
    tokens, (weight_rows, in_features) = x.shape[0], weight.shape
    if tokens > MAX_TOKENS or not can_launch_early(x.device) or x.itemsize != 2 or in_features % BLOCK_K:
        return None
    out_features = weight_rows // 2 if gated else weight_rows
    multiprocessors = num_multiprocessors(x.device)
    wave = config_of(tokens, out_features, in_features, multiprocessors, may_split)
    tiles = wave.programs(tokens, out_features)
    room = multiprocessors * (MOST_TILES if gated and tokens <= FEW_TOKENS else 1)
    if tiles > room or (tiles < multiprocessors // 3 and weight.numel() > SMALL):
        return None
    if tokens > 64 and wave.pieces == 1 and in_features >= LONG:
        return None
    # Reading a large weight takes longer than a launch, and cuBLAS leaves fewer multiprocessors idle.
    is_idle = weight.numel() > LARGE and tokens > FEW_TOKENS and tiles < MIN_BUSY * multiprocessors
    return None if is_idle else wave


@functools.cache
def config_of(tokens: int, out_features: int, in_features: int, multiprocessors: int, may_split: bool) -> TileConfig:
    """Cut a product into tiles. If these are few, cut smaller tiles, or pieces if the product may be split."""
    block_m = FEW_TOKENS if tokens <= FEW_TOKENS else 32 if tokens <= 32 else 64
    token_tiles, block_n = cdiv(tokens, block_m), 64
    if block_m == 64 and not may_split and 2 * token_tiles * cdiv(out_features, 64) <= multiprocessors:
        block_n = 32
    output_tiles = cdiv(out_features, block_n)
    most = min(MAX_PIECES, multiprocessors // (token_tiles * output_tiles)) if may_split else 1
    pieces = max((p for p in range(1, most + 1) if in_features % (p * BLOCK_K) == 0), default=1)
    return TileConfig(block_m, block_n, BLOCK_K, pieces, stages=MAX_STAGES)


def one_wave_linear(
    x: Tensor, weight: Tensor, wave: TileConfig, bias: Tensor | None = None, activation: Activation | None = None
) -> Tensor:
    """Compute the product in one launch, cut as `wave` says.

    x: [tokens, in_features]; weight: [out_features, in_features]; bias: [out_features]
    activation: if given, weight and bias have twice as many rows, gates before ups
    Returns [tokens, out_features], or several pieces, [pieces, tokens, out_features] float32; the first has the bias.
    """
    gated = activation is not None
    tokens, weight_rows = x.shape[0], weight.shape[0]
    out_features = weight_rows // 2 if gated else weight_rows
    assert x.is_contiguous()
    dtype = x.dtype if wave.pieces == 1 else torch.float32
    out = torch.empty((wave.pieces, tokens, out_features), dtype=dtype, device=x.device)
    stage = (wave.block_m + wave.block_n * (2 if gated else 1)) * BLOCK_K * x.itemsize
    together = min(MOST_TILES, cdiv(wave.programs(tokens, out_features), num_multiprocessors(x.device)))
    wave = wave._replace(stages=stages_that_fit(wave.stages, stage, x.device, together))
    return multiply_tiles(x, plain_operand(weight), wave, out, Epilogue(bias=bias), activation)
