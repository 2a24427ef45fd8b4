"""The products of a single token with its experts, in two launches, as fast as the experts can be read.

The first multiplies all gates and ups. For the second, the results of all experts are one long vector, and the experts'
down matrices lie side by side: their product is the weighted sum already.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.experts.route import Routes
from nanoinfer.kernels.launch import early_launch, load_complete, num_multiprocessors, wait_for_predecessor
from nanoinfer.kernels.linear.activation import Activation
from nanoinfer.kernels.linear.one_row import MAX_IN_FEATURES, MIN_TILE, WEIGHTS_PER_SM, load_tile, store_dots


def is_one_row(x: Tensor, routes: Routes, down: Tensor) -> bool:
    """Return whether x is one token whose vectors fit into a program's registers."""
    return len(x) == 1 and max(x.shape[1], routes.experts.numel() * down.shape[2]) <= MAX_IN_FEATURES


def one_row_expert_mlps(x: Tensor, routes: Routes, gate_up: Tensor, down: Tensor, activation: Activation) -> Tensor:
    """Compute products.expert_mlps for x of [1, hidden_size]; it rounds no single expert's result."""
    used = routes.experts.shape[1]
    _, hidden_size, size = down.shape
    assert x.is_contiguous()
    assert gate_up.is_contiguous()
    assert down.is_contiguous()
    gated = x.new_empty(used, size)
    block_k = triton.next_power_of_2(hidden_size)
    tile = max(MIN_TILE, 2 * block_k)
    block_n = tile // block_k
    programs = max(max(WEIGHTS_PER_SM // tile, 1) * num_multiprocessors(x.device) // used, 1)
    _gate_up_kernel[(min(triton.cdiv(2 * size, block_n), programs), used)](
        x,
        routes.experts,
        gate_up,
        gated,
        hidden_size,
        2 * size,
        ACTIVATION=activation,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=8 if tile == MIN_TILE else 16,
        **early_launch(x),
    )
    out = x.new_empty(1, hidden_size)
    block_k = triton.next_power_of_2(used * size)
    block_n = WEIGHTS_PER_SM // block_k  # with fewer, larger tiles an H200 reads faster here
    _down_kernel[(min(triton.cdiv(hidden_size, block_n), num_multiprocessors(x.device)),)](
        gated,
        *routes,
        down,
        out,
        size,
        hidden_size,
        USED=used,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=16,
        **early_launch(x),
    )
    return out


@triton.jit
def _gate_up_kernel(
    x_ptr,
    experts_ptr,
    weight_ptr,
    out_ptr,
    in_features,
    weight_rows,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    program, programs, choice = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    k = tl.arange(0, BLOCK_K)
    wait_for_predecessor(EARLY)
    expert = tl.load(experts_ptr + choice).to(tl.int64)
    weight_ptr += expert * weight_rows * in_features
    out_ptr += choice * (weight_rows // 2)
    tile = load_tile(weight_ptr, program, k, in_features, weight_rows, BLOCK_N, True)
    x = tl.load(x_ptr + k, mask=k < in_features, other=0.0)
    wide = x.to(tl.float32)
    for start in range(program * BLOCK_N, weight_rows, programs * BLOCK_N):
        following = load_tile(weight_ptr, start // BLOCK_N + programs, k, in_features, weight_rows, BLOCK_N, True)
        dots = tl.sum(tile.to(tl.float32) * wide[None, :], axis=1)
        store_dots(dots.to(x.dtype), out_ptr, start, weight_rows, ACTIVATION, BLOCK_N)
        tile = following


@triton.jit
def _down_kernel(
    gated_ptr,
    experts_ptr,
    weights_ptr,
    down_ptr,
    out_ptr,
    size,
    out_features,
    USED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    k = tl.arange(0, BLOCK_K)
    inside = k < USED * size
    expert = load_complete(experts_ptr + k // size, inside, 0).to(tl.int64)  # the predecessor has waited for the routes
    weight = load_complete(weights_ptr + k // size, inside, 0.0)
    down_ptrs = down_ptr + expert * out_features * size + k % size
    tile = _load_down(down_ptrs, program, inside, size, out_features, BLOCK_N)
    wait_for_predecessor(EARLY)
    wide = weight * tl.load(gated_ptr + k, mask=inside, other=0.0).to(tl.float32)
    for start in range(program * BLOCK_N, out_features, programs * BLOCK_N):
        following = _load_down(down_ptrs, start // BLOCK_N + programs, inside, size, out_features, BLOCK_N)
        dots = tl.sum(tile.to(tl.float32) * wide[None, :], axis=1)
        store_dots(dots.to(tile.dtype), out_ptr, start, out_features, None, BLOCK_N)
        tile = following


@triton.jit
def _load_down(down_ptrs, tile, inside, size, out_features, BLOCK_N: tl.constexpr):
    """Load BLOCK_N rows of the experts' matrices side by side."""
    n = tile.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (n < out_features)[:, None] & inside[None, :]
    return tl.load(down_ptrs[None, :] + n[:, None] * size, mask=mask, other=0.0)
