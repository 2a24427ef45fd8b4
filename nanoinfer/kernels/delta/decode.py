"""The gated delta rule for a decode step of all rows, its convolution included."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.delta.chunks import CHUNK
from nanoinfer.kernels.delta.convolution import activated, convolve_past, convolve_rows_reference, remember, settled
from nanoinfer.kernels.delta.guesses import delta_guesses_kernel
from nanoinfer.kernels.delta.terms import L2_EPS, gates, gates_of, keys_of, split_heads
from nanoinfer.kernels.launch import launch_options, wait_for_predecessor
from nanoinfer.kernels.states.fold import fold_rows_reference
from nanoinfer.kernels.states.guessed import PLACES
from nanoinfer.kernels.states.memory import LayerStates, StateRows
from nanoinfer.kernels.states.since import read, write
from nanoinfer.kernels.states.walk import Walk, begin_walk, read_decays, read_part


def delta_rows(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    weight: Tensor,
    log_decay: Tensor,
    dt_bias: Tensor,
    states: LayerStates,
    rows: StateRows,
    largest: float = 1.0,
) -> Tensor:
    """Let each row's memory forget a little, learn its token, and answer the token's query (Yang et al., 2024).

    S = decay * S; S = S + strength * k (v - S^T k)^T; out = S^T q. decay = exp(-exp(log_decay) * softplus(a +
    dt_bias)), strength = largest * sigmoid(b). q, k and v come out of a convolution and SiLU; then q and k get length
    1, and q key_dim^-0.5. Guesses follow their row's token in their order.

    qkv: [tokens, channels], not convolved: q | k | v, key heads * key dim, the same, value heads * value dim
    a, b: [tokens, value heads]; log_decay, dt_bias: [value heads] float32
    largest: the limit of strengths; above 1, what a state has of a key may change its sign (Grazzi et al., 2025)
    weight: as for convolve_rows, with SiLU
    states: have a recurrence: keys as they were convolved, and updates times what gives these length 1
    Returns [tokens, value heads, value dim] in qkv's dtype; what empty places get has no meaning.
    """
    function = delta_rows_triton if qkv.is_cuda else delta_rows_reference
    return function(qkv, a, b, weight, log_decay, dt_bias, states, rows, largest)


def delta_rows_reference(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    weight: Tensor,
    log_decay: Tensor,
    dt_bias: Tensor,
    states: LayerStates,
    rows: StateRows,
    largest: float = 1.0,
) -> Tensor:
    """delta_rows in torch."""
    recurrence = states.recurrence
    assert recurrence is not None
    heads, _, value_dim = recurrence.matrices.shape[1:]
    sizes = recurrence.key_heads, heads, value_dim
    convolved = convolve_rows_reference(qkv, weight, states.inputs, rows, silu=True)
    queries, keys, values = split_heads(convolved, *sizes)
    raw, factors = keys_of(convolved, *sizes)
    decays, strengths = gates(a, b, log_decay, dt_bias, largest)
    boundaries = fold_rows_reference(recurrence, rows)
    out = torch.zeros((len(qkv), heads, value_dim), dtype=qkv.dtype, device=qkv.device)
    for own, places in rows.in_order():
        where = rows.slots[own], boundaries[own], rows.positions[places]
        since, q, k = read(recurrence, *where), queries[places], keys[places]
        total = since.before + decays[places]
        updates = strengths[places].unsqueeze(-1) * (values[places] - since.answer(k, total))
        out[places] = (since.answer(q, total) + (k * q).sum(-1, keepdim=True) * updates).to(out.dtype)
        write(recurrence, *where, (raw[places], updates * factors[places].unsqueeze(-1), total))
    return out


def delta_rows_triton(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    weight: Tensor,
    log_decay: Tensor,
    dt_bias: Tensor,
    states: LayerStates,
    rows: StateRows,
    largest: float = 1.0,
) -> Tensor:
    """delta_rows as one launch. The kernel before may write qkv, a and b alone: the others are read before it ends.

    A program has a row's key head, and some values of the heads that share it, one part after another.
    """
    recurrence = states.recurrence
    assert recurrence is not None
    heads, key_dim, value_dim = recurrence.matrices.shape[1:]
    out = torch.empty((len(qkv), heads, value_dim), dtype=qkv.dtype, device=qkv.device)
    walk = Walk.of(recurrence, rows)
    has_guesses = rows.first is not None
    own = (rows.first, rows.counts, len(rows.slots)) if has_guesses else ()
    (delta_guesses_kernel if has_guesses else _delta_rows_kernel)[walk.grid](
        qkv,
        a,
        b,
        weight,
        log_decay,
        dt_bias,
        states.inputs,
        *recurrence,
        rows.slots,
        rows.positions,
        rows.boundaries,
        *own,
        out,
        qkv.stride(0),
        a.stride(0),
        b.stride(0),
        LARGEST=largest,
        KEY_HEADS=recurrence.key_heads,
        VALUE_HEADS=heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        WIDTH=weight.shape[1],
        LENGTH=states.inputs.shape[1],
        RING=recurrence.ring,
        TOKENS=CHUNK,
        BLOCK_K=walk.keys,
        BLOCK_V=walk.values,
        EACH=walk.each,
        STAGES=walk.stages,
        PLACES=PLACES,
        num_warps=walk.warps,
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
    keys_ptr,
    updates_ptr,
    decays_ptr,
    slots_ptr,
    positions_ptr,
    boundaries_ptr,
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
    LENGTH: tl.constexpr,
    RING: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    EACH: tl.constexpr,
    STAGES: tl.constexpr,
    PLACES: tl.constexpr,
    EARLY: tl.constexpr,
):
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    TOGETHER: tl.constexpr = VALUE_HEADS // KEY_HEADS
    PARTS: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V  # of a head
    program, key_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    k, r = tl.arange(0, BLOCK_K), tl.arange(0, PLACES)[:, None]
    has_k = k < KEY_DIM
    memory = matrices_ptr, keys_ptr, updates_ptr, decays_ptr
    sizes: tl.constexpr = (KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM)
    first, end = program * EACH, tl.minimum(program * EACH + EACH, TOGETHER * PARTS)
    at_row = row, slots_ptr, positions_ptr, boundaries_ptr
    slot, position, count, entry, known, keys = begin_walk(
        at_row, memory, key_head, k, (first, end), sizes, RING, TOKENS, BLOCK_V
    )
    beside = slot, position, count, entry, known
    q_channel = key_head * KEY_DIM + k
    k_channel = KEY_HEADS * KEY_DIM + q_channel
    where = inputs_ptr, weight_ptr, None, slot, position
    q_past, q_own = convolve_past(where, q_channel, has_k, CHANNELS, WIDTH, LENGTH)
    k_past, k_own = convolve_past(where, k_channel, has_k, CHANNELS, WIDTH, LENGTH)
    wait_for_predecessor(EARLY)

    x_ptr = qkv_ptr + row * qkv_stride
    q_input = tl.load(x_ptr + q_channel, mask=has_k, other=0.0)
    k_input = tl.load(x_ptr + k_channel, mask=has_k, other=0.0)
    # Programs of one key head share its channels, and read no entry of a ring that one of them writes here.
    is_mine = k < tl.where(program == 0, KEY_DIM, 0)
    remember(inputs_ptr, slot, position, q_channel, q_input, is_mine, CHANNELS, LENGTH)
    remember(inputs_ptr, slot, position, k_channel, k_input, is_mine, CHANNELS, LENGTH)
    query = settled(activated(q_past, q_input, q_own))
    key = settled(activated(k_past, k_input, k_own))
    queries, squares, products = tl.reduce((query * query, key * key, key * query), 0, _add_three)
    q_factor, k_factor = tl.rsqrt(queries + L2_EPS) * KEY_DIM**-0.5, tl.rsqrt(squares + L2_EPS)
    both = tl.where(r == 0, key[None, :], tl.where(r == 1, query[None, :], 0.0)).to(keys.dtype)
    scores = tl.dot(both, tl.trans(keys), input_precision="ieee")
    own = slot * RING + tl.maximum(position, 0) % RING
    own_key_ptrs = keys_ptr + (own * KEY_HEADS + key_head) * KEY_DIM + k
    tl.store(own_key_ptrs, key.to(keys_ptr.dtype.element_ty), mask=is_mine & (slot >= 0))

    num_values = tl.where(slot >= 0, VALUE_DIM, 0)
    for i in tl.range(first, end, num_stages=STAGES):
        head, v = key_head * TOGETHER + i // PARTS, i % PARTS * BLOCK_V + tl.arange(0, BLOCK_V)
        has_v = v < num_values
        state, updates = read_part(memory, beside, head, k, v, has_v, sizes)
        so_far, before = read_decays(memory, beside, head, sizes, RING)
        v_channel = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + v
        v_past, v_own = convolve_past(where, v_channel, has_v, CHANNELS, WIDTH, LENGTH)
        v_input = tl.load(x_ptr + v_channel, mask=has_v, other=0.0)
        remember(inputs_ptr, slot, position, v_channel, v_input, has_v, CHANNELS, LENGTH)
        value = settled(activated(v_past, v_input, v_own))
        a, b = tl.load(a_ptr + row * a_stride + head), tl.load(b_ptr + row * b_stride + head)
        log_decay, dt_bias = tl.load(log_decay_ptr + head), tl.load(dt_bias_ptr + head)
        log_decay, strength = gates_of(a, b, log_decay, dt_bias, LARGEST)
        total = before + log_decay

        has, out = tl.reduce((state * key[:, None], state * query[:, None]), 0, _add_two)
        decayed = (scores * tl.exp(total - so_far)[None, :]).to(updates.dtype)
        since = tl.dot(decayed, updates, input_precision="ieee")
        has = has * tl.exp(total) + settled(tl.sum(tl.where(r == 0, since, 0.0), axis=0))
        out = out * tl.exp(total) + settled(tl.sum(tl.where(r == 1, since, 0.0), axis=0))
        update = strength * (value - k_factor * has) * k_factor
        out = q_factor * (out + products * update)
        own_ptrs = updates_ptr + (own * VALUE_HEADS + head) * VALUE_DIM + v
        tl.store(own_ptrs, update.to(updates_ptr.dtype.element_ty), mask=has_v)
        tl.store(decays_ptr + own * VALUE_HEADS + head, total, mask=(slot >= 0) & (i % PARTS == 0))
        out_ptrs = out_ptr + (row * VALUE_HEADS + head) * VALUE_DIM + v
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=v < VALUE_DIM)


@triton.jit
def _add_two(a, b, c, d):
    return a + c, b + d


@triton.jit
def _add_three(a, b, c, d, e, f):
    return a + d, b + e, c + f
