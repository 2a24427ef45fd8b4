"""The gated delta rule for one token a row: a decode step of all rows, its convolution included."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.delta.convolution import activated, convolve_past, convolve_rows_reference, remember, settled
from nanoinfer.kernels.delta.terms import decay_of, gates, gates_of, length_factor, split_heads
from nanoinfer.kernels.launch import (
    cdiv,
    launch_options,
    load_complete,
    next_power_of_2,
    num_multiprocessors,
    wait_for_predecessor,
)

NUMBERS = 8192  # of a matrix that a program has: half of those of a head of 128 x 128
FEW_NUMBERS = 4096  # where heads do not give each multiprocessor a program


def delta_rows(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    weight: Tensor,
    log_decay: Tensor,
    dt_bias: Tensor,
    inputs: Tensor,
    matrices: Tensor,
    slots: Tensor,
    positions: Tensor,
    key_heads: int,
    largest: float = 1.0,
) -> Tensor:
    """Let each row's memory forget a little, learn its token, and answer the token's query (Yang et al., 2024).

    S = decay * S; S = S + strength * (v - S k) k^T; out = S q. decay = exp(-exp(log_decay) * softplus(a + dt_bias)),
    strength = largest * sigmoid(b). q, k and v come out of a convolution and SiLU; then q and k get length 1, and q
    key_dim^-0.5.

    qkv: [rows, channels], not convolved: q | k | v, key heads * key dim, the same, value heads * value dim
    a, b: [rows, value heads]; log_decay, dt_bias: [value heads] float32; key_heads: divides value heads
    largest: the limit of strengths; above 1, what a state has of a key may change its sign (Grazzi et al., 2025)
    weight, inputs, slots, positions: as for convolve_rows, with SiLU
    matrices: [slots, value heads, value dim, key dim], float32 or bfloat16: S, changed in place as inputs are
    Returns [rows, value heads, value dim] in qkv's dtype; what empty rows get has no meaning.
    """
    function = delta_rows_triton if qkv.is_cuda else delta_rows_reference
    return function(qkv, a, b, weight, log_decay, dt_bias, inputs, matrices, slots, positions, key_heads, largest)


def delta_rows_reference(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    weight: Tensor,
    log_decay: Tensor,
    dt_bias: Tensor,
    inputs: Tensor,
    matrices: Tensor,
    slots: Tensor,
    positions: Tensor,
    key_heads: int,
    largest: float = 1.0,
) -> Tensor:
    """delta_rows in torch."""
    convolved = convolve_rows_reference(qkv, weight, inputs, slots, positions, silu=True)
    q, k, v = (x.unsqueeze(-1) for x in split_heads(convolved, key_heads, *matrices.shape[1:3]))
    decays, strengths = (x[..., None, None] for x in gates(a, b, log_decay, dt_bias, largest))
    filled = slots >= 0
    states = matrices[slots.clamp(min=0).long()].float().where(filled[:, None, None, None], 0) * decays.exp()
    states = states + strengths * (v - states @ k) @ k.mT
    matrices[slots[filled].long()] = states[filled].to(matrices.dtype)
    return (states @ q).squeeze(-1).to(qkv.dtype)


def delta_rows_triton(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    weight: Tensor,
    log_decay: Tensor,
    dt_bias: Tensor,
    inputs: Tensor,
    matrices: Tensor,
    slots: Tensor,
    positions: Tensor,
    key_heads: int,
    largest: float = 1.0,
) -> Tensor:
    """delta_rows as one launch. The kernel before may write qkv, a and b alone: the others are read before it ends.

    A program has a row's head, or some of its values: rows of the matrix, which it reads and writes once.
    """
    rows, width = len(qkv), weight.shape[1]
    value_heads, value_dim, key_dim = matrices.shape[1:]
    out = torch.empty((rows, value_heads, value_dim), dtype=qkv.dtype, device=qkv.device)
    block_k = next_power_of_2(key_dim)
    numbers = FEW_NUMBERS if rows * value_heads < num_multiprocessors(qkv.device) else NUMBERS
    block_v = max(1, min(numbers // block_k, next_power_of_2(value_dim)))
    _delta_rows_kernel[(cdiv(value_dim, block_v), value_heads, rows)](
        qkv,
        a,
        b,
        weight,
        log_decay,
        dt_bias,
        inputs,
        matrices,
        slots,
        positions,
        out,
        qkv.stride(0),
        a.stride(0),
        b.stride(0),
        LARGEST=largest,
        KEY_HEADS=key_heads,
        VALUE_HEADS=value_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        WIDTH=width,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        num_warps=4,
        **launch_options(qkv),
    )
    return out


@triton.jit
def _delta_rows_kernel(
    qkv_ptr,
    a_ptr,
    b_ptr,
    weight_ptr,
    log_decay_ptr,
    dt_bias_ptr,
    inputs_ptr,
    matrices_ptr,
    slots_ptr,
    positions_ptr,
    out_ptr,
    qkv_stride,
    a_stride,
    b_stride,
    LARGEST: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    EARLY: tl.constexpr,
):
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    part, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    k, v = tl.arange(0, BLOCK_K), part * BLOCK_V + tl.arange(0, BLOCK_V)
    has_k, has_v = k < KEY_DIM, v < VALUE_DIM
    slot = load_complete(slots_ptr + row).to(tl.int64)
    position = load_complete(positions_ptr + row)
    matrix_ptrs = matrices_ptr + ((slot * VALUE_HEADS + head) * VALUE_DIM + v[:, None]) * KEY_DIM + k
    matrix_mask = (v < tl.where(slot >= 0, VALUE_DIM, 0))[:, None] & has_k
    state = load_complete(matrix_ptrs, matrix_mask, 0.0).to(tl.float32)

    q_channel = head // GROUP * KEY_DIM + k
    k_channel = KEY_HEADS * KEY_DIM + q_channel
    v_channel = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + v
    where = inputs_ptr, weight_ptr, None, slot, position
    q_past, q_own = convolve_past(where, q_channel, has_k, CHANNELS, WIDTH)
    k_past, k_own = convolve_past(where, k_channel, has_k, CHANNELS, WIDTH)
    v_past, v_own = convolve_past(where, v_channel, has_v, CHANNELS, WIDTH)
    log_decay, dt_bias = tl.load(log_decay_ptr + head), tl.load(dt_bias_ptr + head)
    wait_for_predecessor(EARLY)

    x_ptr = qkv_ptr + row * qkv_stride
    q_input = tl.load(x_ptr + q_channel, mask=has_k, other=0.0)
    k_input = tl.load(x_ptr + k_channel, mask=has_k, other=0.0)
    v_input = tl.load(x_ptr + v_channel, mask=has_v, other=0.0)
    a, b = tl.load(a_ptr + row * a_stride + head), tl.load(b_ptr + row * b_stride + head)
    # Programs of one key head share its channels, and read no entry of the ring that one of them writes here.
    is_mine = k < tl.where((part == 0) & (head % GROUP == 0), KEY_DIM, 0)
    remember(inputs_ptr, slot, position, q_channel, q_input, is_mine, CHANNELS, WIDTH)
    remember(inputs_ptr, slot, position, k_channel, k_input, is_mine, CHANNELS, WIDTH)
    remember(inputs_ptr, slot, position, v_channel, v_input, has_v, CHANNELS, WIDTH)

    query = activated(q_past, q_input, q_own)
    key = activated(k_past, k_input, k_own)
    value = settled(activated(v_past, v_input, v_own))
    query *= length_factor(query, 0) * KEY_DIM**-0.5
    key *= length_factor(key, 0)
    log_decay, strength = gates_of(a, b, log_decay, dt_bias, LARGEST)
    decay = decay_of(log_decay)
    # What the new state answers is what the old one does and the update's part: so no sum waits for another.
    update = strength * (value - decay * tl.sum(state * key[None, :], axis=1))
    out = decay * tl.sum(state * query[None, :], axis=1) + update * tl.sum(key * query, axis=0)
    state = decay * state + update[:, None] * key[None, :]
    tl.store(matrix_ptrs, state.to(matrices_ptr.dtype.element_ty), mask=matrix_mask)
    out_ptrs = out_ptr + (row * VALUE_HEADS + head) * VALUE_DIM + v
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=has_v)
