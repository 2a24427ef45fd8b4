"""Mamba2 for a decode step that verifies guesses: a row's tokens together, as those of a short chunk."""

from __future__ import annotations

import triton
import triton.language as tl

from nanoinfer.kernels.launch import wait_for_predecessor
from nanoinfer.kernels.mamba.terms import step_of
from nanoinfer.kernels.states.guessed import convolve_places, places_of, times_matrix, totals_of
from nanoinfer.kernels.states.walk import begin_walk, read_decays, read_part


@triton.jit(do_not_specialize=["rows", "least", "most"])
def mamba_guesses_kernel(
    xbc_ptr,
    dt_ptr,
    weight_ptr,
    bias_ptr,
    log_decay_ptr,
    dt_bias_ptr,
    skips_ptr,
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
    xbc_stride,
    dt_stride,
    least,
    most,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    NUMBERS: tl.constexpr,
    WIDTH: tl.constexpr,
    LENGTH: tl.constexpr,
    RING: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EACH: tl.constexpr,
    STAGES: tl.constexpr,
    PLACES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """mamba_rows with guesses. A program has what one of the plain kernel has, and reads it once for all tokens."""
    CHANNELS: tl.constexpr = HEADS * DIM + 2 * GROUPS * NUMBERS
    TOGETHER: tl.constexpr = HEADS // GROUPS
    PARTS: tl.constexpr = (DIM + BLOCK_D - 1) // BLOCK_D  # of a head
    program, group, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    n, r = tl.arange(0, BLOCK_N), tl.arange(0, PLACES)
    has_n = n < NUMBERS
    memory = matrices_ptr, keys_ptr, updates_ptr, decays_ptr
    sizes: tl.constexpr = (GROUPS, HEADS, NUMBERS, DIM)
    begin, end = program * EACH, tl.minimum(program * EACH + EACH, TOGETHER * PARTS)
    at_row = row, slots_ptr, positions_ptr, boundaries_ptr
    slot, position, since, entry, known, keys = begin_walk(
        at_row, memory, group, n, (begin, end), sizes, RING, TOKENS, BLOCK_D
    )
    beside = slot, position, since, entry, known
    wait_for_predecessor(EARLY)

    place, count = places_of(row, slot, rows, first_ptr, counts_ptr, PLACES)
    is_token = r < count
    where, tokens = (inputs_ptr, weight_ptr, bias_ptr, slot, position, xbc_ptr), (place, count, xbc_stride)
    # Programs of one group share its channels, and read no entry of a ring that one of them writes here.
    is_mine = n < tl.where(program == 0, NUMBERS, 0)
    b_channel = HEADS * DIM + group * NUMBERS + n
    b = convolve_places(where, tokens, b_channel, has_n, is_mine, CHANNELS, WIDTH, LENGTH).to(keys.dtype)
    c_channel = b_channel + GROUPS * NUMBERS
    c = convolve_places(where, tokens, c_channel, has_n, is_mine, CHANNELS, WIDTH, LENGTH).to(keys.dtype)
    scores = tl.dot(c, tl.trans(keys), input_precision="ieee")
    products = tl.dot(c, tl.trans(b), input_precision="ieee")
    own = slot * RING + tl.maximum(position + r, 0) % RING
    own_key_ptrs = keys_ptr + (own[:, None] * GROUPS + group) * NUMBERS + n
    tl.store(own_key_ptrs, b, mask=is_token[:, None] & is_mine)

    kept_type = updates_ptr.dtype.element_ty
    far, step = tl.zeros([PLACES], tl.float32), tl.zeros([PLACES], tl.float32)
    c_since, c_near = tl.zeros([PLACES, TOKENS], kept_type), tl.zeros([PLACES, PLACES], kept_type)
    for i in tl.range(begin, end, num_stages=STAGES):
        head, d = group * TOGETHER + i // PARTS, i % PARTS * BLOCK_D + tl.arange(0, BLOCK_D)
        has_d = d < tl.where(slot >= 0, DIM, 0)
        state, updates = read_part(memory, beside, head, n, d, has_d, sizes)
        x = convolve_places(where, tokens, head * DIM + d, has_d, has_d, CHANNELS, WIDTH, LENGTH)
        if (i == begin) | (i % PARTS == 0):  # all parts of a head share this
            so_far, before = read_decays(memory, beside, head, sizes, RING)
            dt = tl.load(dt_ptr + place * dt_stride + head, mask=is_token, other=0.0)
            log_decay, dt_bias = tl.load(log_decay_ptr + head), tl.load(dt_bias_ptr + head)
            step, log_decay = step_of(dt, log_decay, dt_bias, least, most)
            total, kept = totals_of(log_decay, before, since + r, is_token, TOKENS)
            tl.store(decays_ptr + own * HEADS + head, kept, mask=is_token & (i % PARTS == 0))
            far = tl.exp(total)
            c_since = (scores * tl.exp(total[:, None] - so_far[None, :])).to(kept_type)
            near = tl.exp(tl.where(r[:, None] >= r[None, :], total[:, None] - total[None, :], float("-inf")))
            c_near = (products * near).to(kept_type)

        out = times_matrix(c, state) * far[:, None] + tl.load(skips_ptr + head).to(tl.float32) * x
        out = tl.dot(c_since, updates, out, "ieee")
        update = (step[:, None] * x).to(kept_type)
        out = tl.dot(c_near, update, out, "ieee")
        mask = is_token[:, None] & has_d
        tl.store(updates_ptr + (own[:, None] * HEADS + head) * DIM + d, update, mask=mask)
        out_ptrs = out_ptr + (place[:, None] * HEADS + head) * DIM + d
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)
