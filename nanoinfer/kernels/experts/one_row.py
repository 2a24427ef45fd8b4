"""The products of a single token with its experts, in two launches, as fast as the experts can be read.

The first multiplies all gates and ups, or ups alone. For the second, the results of all experts are one long vector,
and the experts' down matrices lie side by side: their product is the weighted sum already.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.experts.route import Routes
from nanoinfer.kernels.fp8 import BLOCK, Fp8Weight, parts_of
from nanoinfer.kernels.launch import (
    cdiv,
    launch_options,
    load_complete,
    next_power_of_2,
    num_multiprocessors,
    wait_for_predecessor,
)
from nanoinfer.kernels.linear.activation import AnyActivation
from nanoinfer.kernels.linear.fp8.row import multiply_tile, prepare_row
from nanoinfer.kernels.linear.one_row import (
    MAX_IN_FEATURES,
    one_row_gates_and_ups,
    store_dots,
)
from nanoinfer.kernels.linear.operands.plain import PER_MULTIPROCESSOR


def is_one_row(x: Tensor, routes: Routes, size: int) -> bool:
    """Return whether x is one token whose vectors fit into a program's registers; size: an expert's intermediate one"""
    return len(x) == 1 and max(x.shape[1], routes.experts.numel() * size) <= MAX_IN_FEATURES


def one_row_expert_mlps(
    x: Tensor,
    routes: Routes,
    gate_up: Tensor | Fp8Weight,
    down: Tensor | Fp8Weight,
    activation: AnyActivation,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """Compute products.expert_mlps for x of [1, hidden_size]; it rounds no single expert's result."""
    used = routes.experts.shape[1]
    downs, down_scales, (height, width) = parts_of(down)
    _, hidden_size, size = downs.shape
    assert downs.is_contiguous()
    in_fp8 = down_scales is not None
    gated = one_row_gates_and_ups(x, routes.experts, gate_up, gate_up_bias, activation)
    out = x.new_empty(1, hidden_size)
    block_k = next_power_of_2(used * size)
    block_n = PER_MULTIPROCESSOR // block_k  # with fewer, larger tiles an H200 reads faster here
    programs = (2 if in_fp8 else 1) * num_multiprocessors(x.device)
    _down_kernel[(min(cdiv(hidden_size, block_n), programs),)](
        gated,
        *routes,
        downs,
        down_scales,
        down_bias,
        out,
        size,
        hidden_size,
        USED=used,
        BLOCK_USED=next_power_of_2(used),
        BIAS=down_bias is not None,
        HEIGHT=height,
        WIDTH=width,
        IN_WORDS=in_fp8 and x.is_cuda,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=8 if in_fp8 else 16,
        **launch_options(x),
    )
    return out


@triton.jit
def _down_kernel(
    gated_ptr,
    experts_ptr,
    weights_ptr,
    down_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    size,
    out_features,
    USED: tl.constexpr,
    BLOCK_USED: tl.constexpr,
    BIAS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    IN_WORDS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    IN_FP8: tl.constexpr = HEIGHT is not None
    PER_WORD: tl.constexpr = 8 if IN_WORDS else 1
    program, programs = tl.program_id(0), tl.num_programs(0)
    k = tl.arange(0, BLOCK_K)
    inside = k < USED * size
    weight = load_complete(weights_ptr + k // size, inside, 0.0)  # the predecessor has waited for the routes
    if IN_WORDS:
        down_ptr = down_ptr.to(tl.pointer_type(tl.int64))
    words = size // PER_WORD
    word = tl.arange(0, BLOCK_K // PER_WORD)
    has_word = word < USED * words
    expert = load_complete(experts_ptr + word // words, has_word, 0).to(tl.int64)
    down_ptrs = down_ptr + expert * out_features * words + word % words
    tile = _load_down(down_ptrs, program, has_word, words, out_features, BLOCK_N)
    scales = None
    if IN_FP8:
        block = tl.arange(0, BLOCK_K // BLOCK) * BLOCK
        has_block = block < USED * size
        of_block = load_complete(experts_ptr + block // size, has_block, 0)
        across = size // WIDTH
        scale_ptrs = scales_ptr + of_block * (out_features // HEIGHT * across) + block % size // WIDTH
        scales = _load_down_scales(scale_ptrs, program, has_block, across, out_features, HEIGHT, BLOCK_N)
    if BIAS:
        bias = load_down_bias(bias_ptr, program, experts_ptr, weights_ptr, out_features, USED, BLOCK_USED, BLOCK_N)
    wait_for_predecessor(EARLY)
    weighted = weight * tl.load(gated_ptr + k, mask=inside, other=0.0).to(tl.float32)
    x, factor = prepare_row(weighted, BLOCK_K, IN_WORDS)
    for start in range(program * BLOCK_N, out_features, programs * BLOCK_N):
        next_tile = start // BLOCK_N + programs
        following = _load_down(down_ptrs, next_tile, has_word, words, out_features, BLOCK_N)
        dots = multiply_tile(tile, x, factor, scales, BLOCK_N, BLOCK_K, IN_FP8, IN_WORDS)
        if IN_FP8:
            scales = _load_down_scales(scale_ptrs, next_tile, has_block, across, out_features, HEIGHT, BLOCK_N)
        if BIAS:
            dots += bias
            bias = load_down_bias(
                bias_ptr, next_tile, experts_ptr, weights_ptr, out_features, USED, BLOCK_USED, BLOCK_N
            )
        store_dots(dots.to(out_ptr.dtype.element_ty), out_ptr, start, out_features, None, BLOCK_N)
        tile = following


@triton.jit
def _load_down(down_ptrs, tile, inside, size, out_features, BLOCK_N: tl.constexpr):
    """Load BLOCK_N rows of the experts' matrices side by side."""
    n = tile.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (n < out_features)[:, None] & inside[None, :]
    return tl.load(down_ptrs[None, :] + n[:, None] * size, mask=mask, other=0.0)


@triton.jit
def load_down_bias(
    bias_ptr,
    tile,
    experts_ptr,
    weights_ptr,
    out_features,
    USED: tl.constexpr,
    BLOCK_USED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Load the weighted sum of the experts' biases of what _load_down loads, [BLOCK_N] float32."""
    n, choice = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_USED)
    expert = load_complete(experts_ptr + choice, choice < USED, 0)
    weight = load_complete(weights_ptr + choice, choice < USED, 0.0)
    mask = (n < out_features)[:, None] & (choice < USED)[None, :]
    bias = tl.load(bias_ptr + expert[None, :] * out_features + n[:, None], mask=mask, other=0.0)
    return tl.sum(bias.to(tl.float32) * weight[None, :], axis=1)


@triton.jit
def _load_down_scales(scale_ptrs, tile, inside, across, out_features, HEIGHT: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load the scales of what _load_down loads, [BLOCK_N, one for each BLOCK of a row's numbers]."""
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (n < out_features)[:, None] & inside[None, :]
    return tl.load(scale_ptrs[None, :] + (n // HEIGHT * across)[:, None], mask=mask, other=0.0)
