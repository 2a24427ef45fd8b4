"""The gated delta rule for a decode step that verifies guesses: a row's tokens together, as those of a short chunk."""

from __future__ import annotations

import triton
import triton.language as tl

from nanoinfer.kernels.delta.inverse import invert_few
from nanoinfer.kernels.delta.terms import gates_of, length_factor
from nanoinfer.kernels.launch import wait_for_predecessor
from nanoinfer.kernels.states.guessed import convolve_places, places_of, times_matrix, totals_of
from nanoinfer.kernels.states.walk import begin_walk, read_decays, read_part


@triton.jit(do_not_specialize=["rows"])
def delta_guesses_kernel(
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
    first_ptr,
    counts_ptr,
    rows,
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
    """delta_rows with guesses. A program has what one of the plain kernel has, and reads it once for all tokens."""
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    TOGETHER: tl.constexpr = VALUE_HEADS // KEY_HEADS
    PARTS: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V  # of a head
    program, key_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    k, r = tl.arange(0, BLOCK_K), tl.arange(0, PLACES)
    has_k = k < KEY_DIM
    memory = matrices_ptr, keys_ptr, updates_ptr, decays_ptr
    sizes: tl.constexpr = (KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM)
    begin, end = program * EACH, tl.minimum(program * EACH + EACH, TOGETHER * PARTS)
    at_row = row, slots_ptr, positions_ptr, boundaries_ptr
    slot, position, since, entry, known, keys = begin_walk(
        at_row, memory, key_head, k, (begin, end), sizes, RING, TOKENS, BLOCK_V
    )
    beside = slot, position, since, entry, known
    wait_for_predecessor(EARLY)

    place, count = places_of(row, slot, rows, first_ptr, counts_ptr, PLACES)
    is_token = r < count
    where, tokens = (inputs_ptr, weight_ptr, None, slot, position, qkv_ptr), (place, count, qkv_stride)
    # Programs of one key head share its channels, and read no entry of a ring that one of them writes here.
    is_mine = k < tl.where(program == 0, KEY_DIM, 0)
    q_channel = key_head * KEY_DIM + k
    k_channel = KEY_HEADS * KEY_DIM + q_channel
    query = convolve_places(where, tokens, q_channel, has_k, is_mine, CHANNELS, WIDTH, LENGTH)
    key = convolve_places(where, tokens, k_channel, has_k, is_mine, CHANNELS, WIDTH, LENGTH)
    q_factor, k_factor = length_factor(query, 1) * KEY_DIM**-0.5, length_factor(key, 1)
    query, key = query.to(keys.dtype), key.to(keys.dtype)
    q_scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
    k_scores = tl.dot(key, tl.trans(keys), input_precision="ieee")
    q_products = tl.dot(query, tl.trans(key), input_precision="ieee")
    k_products = tl.dot(key, tl.trans(key), input_precision="ieee") * k_factor[:, None]
    own = slot * RING + tl.maximum(position + r, 0) % RING
    own_key_ptrs = keys_ptr + (own[:, None] * KEY_HEADS + key_head) * KEY_DIM + k
    tl.store(own_key_ptrs, key, mask=is_token[:, None] & is_mine)

    kept_type = updates_ptr.dtype.element_ty
    far = tl.zeros([PLACES], tl.float32)
    k_since, q_since = tl.zeros([PLACES, TOKENS], kept_type), tl.zeros([PLACES, TOKENS], kept_type)
    learn, q_near = tl.zeros([PLACES, PLACES], tl.float32), tl.zeros([PLACES, PLACES], kept_type)
    for i in tl.range(begin, end, num_stages=STAGES):
        head, v = key_head * TOGETHER + i // PARTS, i % PARTS * BLOCK_V + tl.arange(0, BLOCK_V)
        has_v = v < tl.where(slot >= 0, VALUE_DIM, 0)
        state, updates = read_part(memory, beside, head, k, v, has_v, sizes)
        v_channel = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + v
        value = convolve_places(where, tokens, v_channel, has_v, has_v, CHANNELS, WIDTH, LENGTH)
        if (i == begin) | (i % PARTS == 0):  # all parts of a head share this
            so_far, before = read_decays(memory, beside, head, sizes, RING)
            a = tl.load(a_ptr + place * a_stride + head, mask=is_token, other=0.0)
            b = tl.load(b_ptr + place * b_stride + head, mask=is_token, other=0.0)
            log_decay, dt_bias = tl.load(log_decay_ptr + head), tl.load(dt_bias_ptr + head)
            log_decay, strength = gates_of(a, b, log_decay, dt_bias, LARGEST)
            total, kept = totals_of(log_decay, before, since + r, is_token, TOKENS)
            tl.store(decays_ptr + own * VALUE_HEADS + head, kept, mask=is_token & (i % PARTS == 0))
            far, decay = tl.exp(total), tl.exp(total[:, None] - so_far[None, :])
            k_since, q_since = (k_scores * decay).to(kept_type), (q_scores * decay).to(kept_type)
            near = tl.exp(tl.where(r[:, None] >= r[None, :], total[:, None] - total[None, :], float("-inf")))
            q_near = (q_products * near).to(kept_type)
            # What a token learns, those behind it have.
            system = tl.where(r[:, None] > r[None, :], k_products * near, 0.0) * strength[:, None] * k_factor[None, :]
            learn = invert_few(system) * k_factor[:, None] * strength[None, :]

        has = tl.dot(k_since, updates, times_matrix(key, state) * far[:, None], "ieee")
        out = tl.dot(q_since, updates, times_matrix(query, state) * far[:, None], "ieee")
        update = tl.dot(learn, value - k_factor[:, None] * has, input_precision="tf32x3").to(kept_type)
        out = tl.dot(q_near, update, out, "ieee") * q_factor[:, None]
        mask = is_token[:, None] & has_v
        tl.store(updates_ptr + (own[:, None] * VALUE_HEADS + head) * VALUE_DIM + v, update, mask=mask)
        out_ptrs = out_ptr + (place[:, None] * VALUE_HEADS + head) * VALUE_DIM + v
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)
