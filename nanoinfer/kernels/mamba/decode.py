"""Mamba2 for one token a row: a decode step of all rows, its convolution included."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.delta.convolution import activated, convolve_past, convolve_rows_reference, remember, settled
from nanoinfer.kernels.delta.terms import decay_of
from nanoinfer.kernels.launch import (
    cdiv,
    launch_options,
    load_complete,
    next_power_of_2,
    num_multiprocessors,
    wait_for_predecessor,
)
from nanoinfer.kernels.mamba.terms import split_channels, step_of, steps_of

INPUTS, FEW_INPUTS = 32, 16  # of a head that a program has; where heads do not give each multiprocessor one


def mamba_rows(
    xbc: Tensor,
    dt: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    log_decay: Tensor,
    dt_bias: Tensor,
    skips: Tensor,
    inputs: Tensor,
    matrices: Tensor,
    slots: Tensor,
    positions: Tensor,
    groups: int,
    limits: tuple[float, float],
) -> Tensor:
    """Let each row's state forget a little, take in its token, and answer it (Dao and Gu, 2024).

    S = decay * S + step * x B^T; out = S C + skip * x. step = softplus(dt + dt_bias) within the limits, decay =
    exp(-exp(log_decay) * step). x, B and C come out of a convolution and SiLU.

    xbc: [rows, channels], not convolved: x | B | C, heads * dim, groups * numbers, and the same
    dt: [rows, heads]; log_decay, dt_bias, skips: [heads] float32; groups: divide heads, which share a group's B and C
    weight, inputs, slots, positions: as for convolve_rows, with SiLU; bias: [channels], the convolution's
    matrices: [slots, heads, dim, numbers], float32 or bfloat16: S, changed in place as inputs are
    Returns [rows, heads, dim] in xbc's dtype; what empty rows get has no meaning.
    """
    function = mamba_rows_triton if xbc.is_cuda else mamba_rows_reference
    parameters = weight, bias, log_decay, dt_bias, skips
    return function(xbc, dt, *parameters, inputs, matrices, slots, positions, groups, limits)


def mamba_rows_reference(
    xbc: Tensor,
    dt: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    log_decay: Tensor,
    dt_bias: Tensor,
    skips: Tensor,
    inputs: Tensor,
    matrices: Tensor,
    slots: Tensor,
    positions: Tensor,
    groups: int,
    limits: tuple[float, float],
) -> Tensor:
    """mamba_rows in torch."""
    convolved = convolve_rows_reference(xbc, weight, inputs, slots, positions, True, bias)
    heads, dim, _ = matrices.shape[1:]
    x, b, c = (y.unsqueeze(-1) for y in split_channels(convolved, heads, dim, groups))
    steps, decays = (y[..., None, None] for y in steps_of(dt, log_decay, dt_bias, limits))
    filled = slots >= 0
    states = matrices[slots.clamp(min=0).long()].float().where(filled[:, None, None, None], 0) * decays.exp()
    states = states + steps * x @ b.mT
    matrices[slots[filled].long()] = states[filled].to(matrices.dtype)
    return (states @ c + skips.float()[:, None, None] * x).squeeze(-1).to(xbc.dtype)


def mamba_rows_triton(
    xbc: Tensor,
    dt: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    log_decay: Tensor,
    dt_bias: Tensor,
    skips: Tensor,
    inputs: Tensor,
    matrices: Tensor,
    slots: Tensor,
    positions: Tensor,
    groups: int,
    limits: tuple[float, float],
) -> Tensor:
    """mamba_rows as one launch. The kernel before may write xbc and dt alone: the others are read before it ends.

    A program has a row's head, or some of its inputs: rows of the matrix, which it reads and writes once.
    """
    rows, (heads, dim, numbers) = len(xbc), matrices.shape[1:]
    out = torch.empty((rows, heads, dim), dtype=xbc.dtype, device=xbc.device)
    block_n = next_power_of_2(numbers)
    most = FEW_INPUTS if rows * heads < num_multiprocessors(xbc.device) else INPUTS
    block_d = min(most, next_power_of_2(dim))
    _mamba_rows_kernel[(cdiv(dim, block_d), heads, rows)](
        xbc,
        dt,
        weight,
        bias,
        log_decay,
        dt_bias,
        skips,
        inputs,
        matrices,
        slots,
        positions,
        out,
        xbc.stride(0),
        dt.stride(0),
        *limits,
        GROUPS=groups,
        HEADS=heads,
        DIM=dim,
        NUMBERS=numbers,
        WIDTH=weight.shape[1],
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        num_warps=4,
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
    slots_ptr,
    positions_ptr,
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
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
):
    CHANNELS: tl.constexpr = HEADS * DIM + 2 * GROUPS * NUMBERS
    TOGETHER: tl.constexpr = HEADS // GROUPS
    part, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    n, d = tl.arange(0, BLOCK_N), part * BLOCK_D + tl.arange(0, BLOCK_D)
    has_n, has_d = n < NUMBERS, d < DIM
    slot = load_complete(slots_ptr + row).to(tl.int64)
    position = load_complete(positions_ptr + row)
    matrix_ptrs = matrices_ptr + ((slot * HEADS + head) * DIM + d[:, None]) * NUMBERS + n
    matrix_mask = (d < tl.where(slot >= 0, DIM, 0))[:, None] & has_n
    state = load_complete(matrix_ptrs, matrix_mask, 0.0).to(tl.float32)

    x_channel = head * DIM + d
    b_channel = HEADS * DIM + head // TOGETHER * NUMBERS + n
    c_channel = b_channel + GROUPS * NUMBERS
    where = inputs_ptr, weight_ptr, bias_ptr, slot, position
    x_past, x_own = convolve_past(where, x_channel, has_d, CHANNELS, WIDTH)
    b_past, b_own = convolve_past(where, b_channel, has_n, CHANNELS, WIDTH)
    c_past, c_own = convolve_past(where, c_channel, has_n, CHANNELS, WIDTH)
    log_decay, dt_bias, skip = tl.load(log_decay_ptr + head), tl.load(dt_bias_ptr + head), tl.load(skips_ptr + head)
    wait_for_predecessor(EARLY)

    inputs = xbc_ptr + row * xbc_stride
    x_input = tl.load(inputs + x_channel, mask=has_d, other=0.0)
    b_input = tl.load(inputs + b_channel, mask=has_n, other=0.0)
    c_input = tl.load(inputs + c_channel, mask=has_n, other=0.0)
    dt = tl.load(dt_ptr + row * dt_stride + head)
    # Programs of one group share its channels, and read no entry of the ring that one of them writes here.
    is_mine = n < tl.where((part == 0) & (head % TOGETHER == 0), NUMBERS, 0)
    remember(inputs_ptr, slot, position, x_channel, x_input, has_d, CHANNELS, WIDTH)
    remember(inputs_ptr, slot, position, b_channel, b_input, is_mine, CHANNELS, WIDTH)
    remember(inputs_ptr, slot, position, c_channel, c_input, is_mine, CHANNELS, WIDTH)

    x = settled(activated(x_past, x_input, x_own))
    b, c = activated(b_past, b_input, b_own), activated(c_past, c_input, c_own)
    step, log_decay = step_of(dt, log_decay, dt_bias, least, most)
    decay = decay_of(log_decay)
    # What the new state answers is what the old one does and the token's part: so no sum waits for another.
    out = decay * tl.sum(state * c[None, :], axis=1) + (step * tl.sum(b * c, axis=0) + skip) * x
    state = decay * state + (step * x)[:, None] * b[None, :]
    tl.store(matrix_ptrs, state.to(matrices_ptr.dtype.element_ty), mask=matrix_mask)
    tl.store(out_ptr + (row * HEADS + head) * DIM + d, out.to(out_ptr.dtype.element_ty), mask=has_d)
