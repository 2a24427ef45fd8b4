"""Mamba2 for a decode step of all rows, its convolution included."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.delta.chunks import CHUNK
from nanoinfer.kernels.delta.convolution import activated, convolve_past, convolve_rows_reference, remember, settled
from nanoinfer.kernels.launch import launch_options, wait_for_predecessor
from nanoinfer.kernels.mamba.guesses import mamba_guesses_kernel
from nanoinfer.kernels.mamba.terms import grouped, split_channels, step_of, steps_of
from nanoinfer.kernels.states.fold import fold_rows_reference
from nanoinfer.kernels.states.guessed import PLACES
from nanoinfer.kernels.states.memory import LayerStates, StateRows
from nanoinfer.kernels.states.since import read, write
from nanoinfer.kernels.states.walk import Walk, begin_walk, read_decays, read_part


def mamba_rows(
    xbc: Tensor,
    dt: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    log_decay: Tensor,
    dt_bias: Tensor,
    skips: Tensor,
    states: LayerStates,
    rows: StateRows,
    limits: tuple[float, float],
) -> Tensor:
    """Let each row's state forget a little, take in its token, and answer it (Dao and Gu, 2024).

    S = decay * S + B (step * x)^T; out = S^T C + skip * x. step = softplus(dt + dt_bias) within the limits, decay =
    exp(-exp(log_decay) * step). x, B and C come out of a convolution and SiLU. Guesses follow their row's token in
    their order.

    xbc: [tokens, channels], not convolved: x | B | C, heads * dim, groups * numbers, and the same
    dt: [tokens, heads]; log_decay, dt_bias, skips: [heads] float32
    weight: as for convolve_rows, with SiLU; bias: [channels], the convolution's
    states: have a recurrence: its keys are B, whose heads are the groups, and its updates step * x
    Returns [tokens, heads, dim] in xbc's dtype; what empty places get has no meaning.
    """
    function = mamba_rows_triton if xbc.is_cuda else mamba_rows_reference
    return function(xbc, dt, weight, bias, log_decay, dt_bias, skips, states, rows, limits)


def mamba_rows_reference(
    xbc: Tensor,
    dt: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    log_decay: Tensor,
    dt_bias: Tensor,
    skips: Tensor,
    states: LayerStates,
    rows: StateRows,
    limits: tuple[float, float],
) -> Tensor:
    """mamba_rows in torch."""
    recurrence = states.recurrence
    assert recurrence is not None
    (heads, dim), groups = recurrence.updates.shape[2:], recurrence.key_heads
    convolved = convolve_rows_reference(xbc, weight, states.inputs, rows, True, bias)
    x, b, c = split_channels(convolved, heads, dim, groups)
    raw = grouped(convolved, heads * dim, groups)
    steps, decays = steps_of(dt, log_decay, dt_bias, limits)
    boundaries = fold_rows_reference(recurrence, rows)
    out = torch.zeros((len(xbc), heads, dim), dtype=xbc.dtype, device=xbc.device)
    for own, places in rows.in_order():
        where = rows.slots[own], boundaries[own], rows.positions[places]
        since, inputs = read(recurrence, *where), x[places]
        total, updates = since.before + decays[places], steps[places].unsqueeze(-1) * inputs
        answers = since.answer(c[places], total) + (b[places] * c[places]).sum(-1, keepdim=True) * updates
        out[places] = (answers + skips.float().unsqueeze(-1) * inputs).to(out.dtype)
        write(recurrence, *where, (raw[places], updates, total))
    return out


def mamba_rows_triton(
    xbc: Tensor,
    dt: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    log_decay: Tensor,
    dt_bias: Tensor,
    skips: Tensor,
    states: LayerStates,
    rows: StateRows,
    limits: tuple[float, float],
) -> Tensor:
    """mamba_rows as one launch. The kernel before may write xbc and dt alone: the others are read before it ends.

    A program has a row's group, and some inputs of the heads that share it, one part after another.
    """
    recurrence = states.recurrence
    assert recurrence is not None
    heads, numbers, dim = recurrence.matrices.shape[1:]
    out = torch.empty((len(xbc), heads, dim), dtype=xbc.dtype, device=xbc.device)
    walk = Walk.of(recurrence, rows)
    has_guesses = rows.first is not None
    own = (rows.first, rows.counts, len(rows.slots)) if has_guesses else ()
    (mamba_guesses_kernel if has_guesses else _mamba_rows_kernel)[walk.grid](
        xbc,
        dt,
        weight,
        bias,
        log_decay,
        dt_bias,
        skips,
        states.inputs,
        *recurrence,
        rows.slots,
        rows.positions,
        rows.boundaries,
        *own,
        out,
        xbc.stride(0),
        dt.stride(0),
        *limits,
        GROUPS=recurrence.key_heads,
        HEADS=heads,
        DIM=dim,
        NUMBERS=numbers,
        WIDTH=weight.shape[1],
        LENGTH=states.inputs.shape[1],
        RING=recurrence.ring,
        TOKENS=CHUNK,
        BLOCK_N=walk.keys,
        BLOCK_D=walk.values,
        EACH=walk.each,
        STAGES=walk.stages,
        PLACES=PLACES,
        num_warps=walk.warps,
        **launch_options(xbc),
    )
    return out


@triton.jit(do_not_specialize=["least", "most"])
def _mamba_rows_kernel(
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
    CHANNELS: tl.constexpr = HEADS * DIM + 2 * GROUPS * NUMBERS
    TOGETHER: tl.constexpr = HEADS // GROUPS
    PARTS: tl.constexpr = (DIM + BLOCK_D - 1) // BLOCK_D  # of a head
    program, group, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    n, r = tl.arange(0, BLOCK_N), tl.arange(0, PLACES)[:, None]
    has_n = n < NUMBERS
    memory = matrices_ptr, keys_ptr, updates_ptr, decays_ptr
    sizes: tl.constexpr = (GROUPS, HEADS, NUMBERS, DIM)
    first, end = program * EACH, tl.minimum(program * EACH + EACH, TOGETHER * PARTS)
    at_row = row, slots_ptr, positions_ptr, boundaries_ptr
    slot, position, count, entry, known, keys = begin_walk(
        at_row, memory, group, n, (first, end), sizes, RING, TOKENS, BLOCK_D
    )
    beside = slot, position, count, entry, known
    b_channel = HEADS * DIM + group * NUMBERS + n
    c_channel = b_channel + GROUPS * NUMBERS
    where = inputs_ptr, weight_ptr, bias_ptr, slot, position
    b_past, b_own = convolve_past(where, b_channel, has_n, CHANNELS, WIDTH, LENGTH)
    c_past, c_own = convolve_past(where, c_channel, has_n, CHANNELS, WIDTH, LENGTH)
    wait_for_predecessor(EARLY)

    inputs = xbc_ptr + row * xbc_stride
    b_input = tl.load(inputs + b_channel, mask=has_n, other=0.0)
    c_input = tl.load(inputs + c_channel, mask=has_n, other=0.0)
    # Programs of one group share its channels, and read no entry of a ring that one of them writes here.
    is_mine = n < tl.where(program == 0, NUMBERS, 0)
    remember(inputs_ptr, slot, position, b_channel, b_input, is_mine, CHANNELS, LENGTH)
    remember(inputs_ptr, slot, position, c_channel, c_input, is_mine, CHANNELS, LENGTH)
    b, c = settled(activated(b_past, b_input, b_own)), settled(activated(c_past, c_input, c_own))
    products = tl.sum(b * c, axis=0)
    scores = tl.dot(tl.where(r == 0, c[None, :], 0.0).to(keys.dtype), tl.trans(keys), input_precision="ieee")
    own = slot * RING + tl.maximum(position, 0) % RING
    own_key_ptrs = keys_ptr + (own * GROUPS + group) * NUMBERS + n
    tl.store(own_key_ptrs, b.to(keys_ptr.dtype.element_ty), mask=is_mine & (slot >= 0))

    num_inputs = tl.where(slot >= 0, DIM, 0)
    for i in tl.range(first, end, num_stages=STAGES):
        head, d = group * TOGETHER + i // PARTS, i % PARTS * BLOCK_D + tl.arange(0, BLOCK_D)
        has_d = d < num_inputs
        state, updates = read_part(memory, beside, head, n, d, has_d, sizes)
        so_far, before = read_decays(memory, beside, head, sizes, RING)
        x_channel = head * DIM + d
        x_past, x_own = convolve_past(where, x_channel, has_d, CHANNELS, WIDTH, LENGTH)
        x_input = tl.load(inputs + x_channel, mask=has_d, other=0.0)
        remember(inputs_ptr, slot, position, x_channel, x_input, has_d, CHANNELS, LENGTH)
        x = settled(activated(x_past, x_input, x_own))
        dt = tl.load(dt_ptr + row * dt_stride + head)
        log_decay, dt_bias = tl.load(log_decay_ptr + head), tl.load(dt_bias_ptr + head)
        step, log_decay = step_of(dt, log_decay, dt_bias, least, most)
        total = before + log_decay

        decayed = (scores * tl.exp(total - so_far)[None, :]).to(updates.dtype)
        since = tl.dot(decayed, updates, input_precision="ieee")
        out = tl.sum(state * c[:, None], axis=0) * tl.exp(total)
        out += settled(tl.sum(tl.where(r == 0, since, 0.0), axis=0))
        out += (step * products + tl.load(skips_ptr + head)) * x
        own_ptrs = updates_ptr + (own * HEADS + head) * DIM + d
        tl.store(own_ptrs, (step * x).to(updates_ptr.dtype.element_ty), mask=has_d)
        tl.store(decays_ptr + own * HEADS + head, total, mask=(slot >= 0) & (i % PARTS == 0))
        tl.store(out_ptr + (row * HEADS + head) * DIM + d, out.to(out_ptr.dtype.element_ty), mask=d < DIM)
