"""Products of many tokens with the gates and ups of an MLP, in the launch that applies the activation.

Behind cuBLAS another launch reads all gates and ups again. That takes up to a third of the product's own time. The
kernel here has a tile's gates and ups in registers. Each program computes many tiles, one after another. The first
numbers of its next tile are on their way while it finishes one. A tensor-memory copy fetches a tile's rows of both
halves of the weight, so that one product of the tensor cores makes its gates and its ups.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nanoinfer.kernels.launch import (
    COPIED_BYTES,
    can_copy,
    cdiv,
    is_measured,
    launch_options,
    num_multiprocessors,
    wait_for_predecessor,
)
from nanoinfer.kernels.linear.activation import Activation, gate_mul_block

BLOCK_M = 128  # tokens in a tile
BLOCK_N = 128  # its outputs: as many gates and as many ups
BLOCK_K = 64  # inputs at a time
STAGES = 4  # of such inputs, on their way at once
GROUP = 8  # tiles of tokens that are computed together, so that the L2 cache has what they share
MIN_TOKENS = 512  # fewer were not measured
MAX_INPUTS = 4096  # of more, the activation takes a smaller share of the time; they were not measured
MIN_BUSY = 0.9  # the share of the programs' time in which they have a tile


def is_faster(x: Tensor, weight: Tensor) -> bool:
    """Return whether gated_linear is faster than cuBLAS and another launch; x, weight: as there."""
    tokens, in_features = x.shape
    if tokens < MIN_TOKENS or in_features > MAX_INPUTS or not is_measured(x.device) or x.itemsize != 2:
        return False
    if not can_copy(x, weight) or weight.shape[0] // 2 * x.itemsize % COPIED_BYTES:  # the result's rows
        return False
    tiles, multiprocessors = _tiles(x, weight), num_multiprocessors(x.device)
    return tiles >= MIN_BUSY * cdiv(tiles, multiprocessors) * multiprocessors


def gated_linear(x: Tensor, weight: Tensor, activation: Activation) -> Tensor:
    """Compute act(gate) * up of many tokens.

    x: [tokens, in_features]; weight: [2 * size, in_features], gates before ups
    Returns [tokens, size], whose gates and ups are rounded to x's dtype before the activation, as cuBLAS does.
    """
    (tokens, in_features), size = x.shape, weight.shape[0] // 2
    assert x.is_contiguous()
    assert weight.is_contiguous()
    out = torch.empty((tokens, size), dtype=x.dtype, device=x.device)
    tiles = _tiles(x, weight)
    halves = [2, size, in_features], [size * in_features, in_features, 1]
    _gated_kernel[(min(tiles, num_multiprocessors(x.device)),)](
        TensorDescriptor(x, [tokens, in_features], [in_features, 1], [BLOCK_M, BLOCK_K]),
        TensorDescriptor(weight, *halves, [2, BLOCK_N, BLOCK_K]),
        TensorDescriptor(out, [tokens, size], [size, 1], [BLOCK_M, BLOCK_N]),
        tokens,
        size,
        in_features,
        tiles,
        ACTIVATION=activation,
        GROUP=GROUP,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        num_warps=8,
        num_stages=STAGES,
        **launch_options(x),
    )
    return out


def _tiles(x: Tensor, weight: Tensor) -> int:
    return cdiv(len(x), BLOCK_M) * cdiv(weight.shape[0] // 2, BLOCK_N)


@triton.jit(do_not_specialize=["tokens", "tiles"])
def _gated_kernel(
    x_copies,
    weight_copies,
    out_copies,
    tokens,
    size,
    in_features,
    tiles,
    ACTIVATION: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY, START_SUCCESSOR=False)  # it would only take up room
    token_tiles = tl.cdiv(tokens, BLOCK_M)
    per_group = GROUP * tl.cdiv(size, BLOCK_N)
    # As one loop, over the inputs of all tiles, Triton pipelines it from one tile to the next.
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        group, place = tile // per_group, tile % per_group
        height = tl.minimum(token_tiles - group * GROUP, GROUP)
        m, n = (group * GROUP + place % height) * BLOCK_M, place // height * BLOCK_N
        acc = tl.zeros([BLOCK_M, 2 * BLOCK_N], tl.float32)
        for start in range(0, in_features, BLOCK_K):
            x = x_copies.load([m, start])
            weight = tl.reshape(weight_copies.load([0, n, start]), [2 * BLOCK_N, BLOCK_K])
            acc = tl.dot(x, tl.trans(weight), acc)
        # Each thread has gates and their ups: this moves no numbers.
        gate, up = tl.split(tl.permute(tl.reshape(acc, [BLOCK_M, 2, BLOCK_N]), (0, 2, 1)))
        gate, up = gate.to(out_copies.dtype), up.to(out_copies.dtype)
        out_copies.store([m, n], gate_mul_block(gate, up, ACTIVATION))
