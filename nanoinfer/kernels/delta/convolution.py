"""Causal convolutions of each channel by itself, over inputs that a ring remembers.

A slot of the ring has the last inputs of a sequence, `width` at least. The input of the token at position p is at
p % length, so that a step writes one entry of each token and reads others. Where it verifies guesses, the ring is so
long that theirs displace none that a later token needs. What stands for a position below 0 counts as 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.delta.chunks import CHUNK, Chunks
from nanoinfer.kernels.launch import cdiv, launch_options, load_complete, next_power_of_2, wait_for_predecessor
from nanoinfer.kernels.states.memory import StateRows, in_ring

ROW_BLOCK = 512  # channels of a row's program
CHUNK_BLOCK = 64  # channels of a chunk's program


def convolve_rows(
    x: Tensor, weight: Tensor, inputs: Tensor, rows: StateRows, silu: bool, bias: Tensor | None = None
) -> Tensor:
    """Convolve the next token of each row, and guesses behind it, with those before them, and remember them.

    x: [tokens, channels]; weight: [channels, width], the token's own factor last
    inputs: [slots, length, channels], the ring; length: from states.memory.inputs_length
    silu: whether SiLU follows
    bias: [channels], added before it; None: nothing
    Returns [tokens, channels] in x's dtype; what empty places get has no meaning.
    """
    function = convolve_rows_triton if x.is_cuda else convolve_rows_reference
    return function(x, weight, inputs, rows, silu, bias)


def convolve_chunks(
    x: Tensor, weight: Tensor, inputs: Tensor, chunks: Chunks, silu: bool, bias: Tensor | None = None
) -> Tensor:
    """Convolve the tokens of a prefill step, and remember the last ones of sequences and before snapshots.

    x: [tokens, channels], may be some columns of a wider matrix; weight, inputs, silu, bias: as for convolve_rows
    Returns [tokens, channels] in x's dtype.
    """
    function = convolve_chunks_triton if x.is_cuda else convolve_chunks_reference
    return function(x, weight, inputs, chunks, silu, bias)


def convolve_rows_reference(
    x: Tensor, weight: Tensor, inputs: Tensor, rows: StateRows, silu: bool, bias: Tensor | None = None
) -> Tensor:
    """convolve_rows in torch."""
    width = weight.shape[1]
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    for own, places in rows.in_order():
        slots, positions = rows.slots[own], rows.positions[places]
        inputs[in_ring(slots, positions, inputs.shape[1])] = x[places]
        window = _recall(inputs, slots, positions + 1, width)
        out[places] = _activate((window.float() * weight.float().T).sum(dim=1), silu, bias).to(x.dtype)
    return out


def convolve_chunks_reference(
    x: Tensor, weight: Tensor, inputs: Tensor, chunks: Chunks, silu: bool, bias: Tensor | None = None
) -> Tensor:
    """convolve_chunks in torch."""
    width = weight.shape[1]
    before = _recall(inputs, chunks.initial, chunks.starts, width - 1)
    bounds = chunks.cu_lens.tolist()
    rows = [torch.cat([past, x[i:j]]) for past, i, j in zip(before, bounds[:-1], bounds[1:], strict=True)]
    for seq, (row, start, slot) in enumerate(zip(rows, chunks.starts.tolist(), chunks.final.tolist(), strict=True)):
        _remember(inputs, slot, row[-width:], start + bounds[seq + 1] - bounds[seq])
    for seq, first, slot in zip(
        chunks.seqs.tolist(), chunks.first_tokens.tolist(), chunks.snapshots.tolist(), strict=True
    ):
        end = first - bounds[seq] + CHUNK
        _remember(inputs, slot, rows[seq][end - 1 : width - 1 + end], int(chunks.starts[seq]) + end)
    windows = torch.cat([row.unfold(0, width, 1) for row in rows])
    return _activate((windows.float() * weight.float()).sum(dim=2), silu, bias).to(x.dtype)


def _recall(inputs: Tensor, slots: Tensor, ends: Tensor, count: int) -> Tensor:
    """Return the inputs of `count` positions before each end, [rows, count, channels]; 0 where there are none."""
    positions = ends.unsqueeze(1) + torch.arange(-count, 0, device=ends.device)
    known = (positions >= 0) & (slots >= 0).unsqueeze(1)
    return inputs[in_ring(slots.clamp(min=0), positions, inputs.shape[1])].where(known.unsqueeze(2), 0)


def _remember(inputs: Tensor, slot: int, row: Tensor, end: int) -> None:
    """Write the inputs of a row, which end before position `end`, to a slot, if it is one."""
    if slot >= 0:
        inputs[slot, torch.arange(end - len(row), end, device=row.device) % inputs.shape[1]] = row


def _activate(x: Tensor, silu: bool, bias: Tensor | None) -> Tensor:
    x = x if bias is None else x + bias.float()
    return F.silu(x) if silu else x


def convolve_rows_triton(
    x: Tensor, weight: Tensor, inputs: Tensor, rows: StateRows, silu: bool, bias: Tensor | None = None
) -> Tensor:
    """convolve_rows as one launch. The kernel before may write x alone: the others are read before it ends."""
    channels, width = weight.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _convolve_rows_kernel[(cdiv(channels, ROW_BLOCK), len(rows.slots))](
        x,
        weight,
        bias,
        inputs,
        rows.slots,
        rows.positions,
        rows.first,
        rows.counts,
        out,
        len(rows.slots),
        x.stride(0),
        CHANNELS=channels,
        WIDTH=width,
        LENGTH=inputs.shape[1],
        SILU=silu,
        BLOCK=ROW_BLOCK,
        **launch_options(x),
    )
    return out


def convolve_chunks_triton(
    x: Tensor, weight: Tensor, inputs: Tensor, chunks: Chunks, silu: bool, bias: Tensor | None = None
) -> Tensor:
    """convolve_chunks as one launch."""
    (tokens, channels), width = x.shape, weight.shape[1]
    assert width <= CHUNK
    out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    _convolve_chunks_kernel[(cdiv(channels, CHUNK_BLOCK), len(chunks.seqs))](
        x,
        weight,
        bias,
        inputs,
        chunks.cu_lens,
        chunks.starts,
        chunks.initial,
        chunks.final,
        chunks.seqs,
        chunks.first_tokens,
        chunks.snapshots,
        out,
        x.stride(0),
        CHANNELS=channels,
        WIDTH=width,
        LENGTH=inputs.shape[1],
        SILU=silu,
        TOKENS=CHUNK,
        BLOCK=CHUNK_BLOCK,
        BLOCK_W=next_power_of_2(width),
        enable_fp_fusion=True,
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _convolve_rows_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    inputs_ptr,
    slots_ptr,
    positions_ptr,
    first_ptr,
    counts_ptr,
    out_ptr,
    rows,
    x_stride,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    LENGTH: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < CHANNELS
    slot = load_complete(slots_ptr + row).to(tl.int64)
    position = load_complete(positions_ptr + row)
    where = inputs_ptr, weight_ptr, bias_ptr, slot, position
    past, own = convolve_past(where, channel, mask, CHANNELS, WIDTH, LENGTH)
    wait_for_predecessor(EARLY)
    x = tl.load(x_ptr + row * x_stride + channel, mask=mask, other=0.0)
    remember(inputs_ptr, slot, position, channel, x, mask, CHANNELS, LENGTH)
    out = past + x.to(tl.float32) * own
    tl.store(out_ptr + row * CHANNELS + channel, silu_or_same(out, SILU).to(x.dtype), mask=mask)
    if first_ptr is not None:
        place = rows + tl.load(first_ptr + row)
        for _ in range(tl.load(counts_ptr + row)):
            tl.debug_barrier()  # all threads see what this program has written to the ring
            position += 1
            where = inputs_ptr, weight_ptr, bias_ptr, slot, position
            past, own = convolve_past(where, channel, mask, CHANNELS, WIDTH, LENGTH)
            x = tl.load(x_ptr + place * x_stride + channel, mask=mask, other=0.0)
            remember(inputs_ptr, slot, position, channel, x, mask, CHANNELS, LENGTH)
            out = past + x.to(tl.float32) * own
            tl.store(out_ptr + place * CHANNELS + channel, silu_or_same(out, SILU).to(x.dtype), mask=mask)
            place += 1


@triton.jit
def convolve_past(where, channel, mask, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, LENGTH: tl.constexpr):
    """Return what the tokens before a row's add to its convolution in these channels, and the token's own factor.

    where: inputs, weights, biases, the slot, int64, of which -1 is no token, and the token's position. May run before
        the wait, if the kernel before does not write inputs
    """
    inputs_ptr, weight_ptr, bias_ptr, slot, position = where
    total = tl.zeros(channel.shape, tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + channel, mask=mask, other=0.0).to(tl.float32)
    for back in tl.static_range(WIDTH - 1, 0, -1):  # a sum over a dimension would have another order in other programs
        known = mask & (channel < tl.where((slot >= 0) & (position >= back), CHANNELS, 0))
        entry = slot * LENGTH + tl.maximum(position - back, 0) % LENGTH
        x = load_complete(inputs_ptr + entry * CHANNELS + channel, known, 0.0)
        weight = tl.load(weight_ptr + channel * WIDTH + WIDTH - 1 - back, mask=mask, other=0.0)
        total += x.to(tl.float32) * weight.to(tl.float32)
    return total, tl.load(weight_ptr + channel * WIDTH + WIDTH - 1, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def remember(inputs_ptr, slot, position, channel, x, mask, CHANNELS: tl.constexpr, LENGTH: tl.constexpr):
    """Write a token's inputs of the convolution to the ring; slot: int64, -1: do not."""
    entry = tl.maximum(position, 0) % LENGTH
    mask &= channel < tl.where(slot >= 0, CHANNELS, 0)
    tl.store(inputs_ptr + (slot * LENGTH + entry) * CHANNELS + channel, x, mask=mask)


@triton.jit
def activated(past, x, own):
    """Return SiLU of a convolution in float32, rounded as convolve_chunks rounds it."""
    return silu_or_same(past + x.to(tl.float32) * own, True).to(x.dtype).to(tl.float32)


@triton.jit
def settled(x):
    """Return numbers as they are, [n], each computed once: threads that want one get it through shared memory.

    Where numbers are fewer than threads, Triton lets each of these load and compute all that it wants.
    """
    return tl.gather(x, tl.arange(0, x.shape[0]), axis=0)


@triton.jit
def silu_or_same(x, SILU: tl.constexpr):
    """Return SiLU of float32 numbers, or the numbers."""
    if SILU:
        return x * tl.sigmoid(x)
    else:
        return x


@triton.jit
def _convolve_chunks_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    inputs_ptr,
    cu_lens_ptr,
    starts_ptr,
    initial_ptr,
    final_ptr,
    seqs_ptr,
    first_tokens_ptr,
    snapshots_ptr,
    out_ptr,
    x_stride,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    LENGTH: tl.constexpr,
    SILU: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    chunk = tl.program_id(1)
    seq, first = tl.load(seqs_ptr + chunk), tl.load(first_tokens_ptr + chunk)
    begin, end = tl.load(cu_lens_ptr + seq), tl.load(cu_lens_ptr + seq + 1)
    start, initial = tl.load(starts_ptr + seq), tl.load(initial_ptr + seq)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < CHANNELS
    w = tl.arange(0, BLOCK_W)
    source = (x_ptr, inputs_ptr, begin, end, start, initial, x_stride)
    factors = (weight_ptr, bias_ptr)

    token = first + tl.arange(0, TOKENS)
    out = _convolve(token, channel, factors, source, CHANNELS, WIDTH, LENGTH, False)
    out = silu_or_same(out, SILU).to(out_ptr.dtype.element_ty)
    sees_new = (token >= begin + WIDTH - 1) & (token < end)
    tl.store(out_ptr + token.to(tl.int64)[:, None] * CHANNELS + channel, out, mask=sees_new[:, None] & mask)
    # The initial slot may be the final one: the program of a sequence's first chunk alone reads the one, then writes
    # the other.
    if first == begin:
        early = begin + w
        early_out = _convolve(early, channel, factors, source, CHANNELS, WIDTH, LENGTH, True)
        early_out = silu_or_same(early_out, SILU).to(out_ptr.dtype.element_ty)
        sees_old = (w < WIDTH - 1) & (early < end)
        tl.store(out_ptr + early.to(tl.int64)[:, None] * CHANNELS + channel, early_out, mask=sees_old[:, None] & mask)
        final = tl.load(final_ptr + seq).to(tl.int64)
        if final >= 0:
            _keep(final, end - WIDTH + w, channel, source, CHANNELS, WIDTH, LENGTH, True)
    snapshot = tl.load(snapshots_ptr + chunk).to(tl.int64)
    if snapshot >= 0:
        _keep(snapshot, first + TOKENS - WIDTH + w, channel, source, CHANNELS, WIDTH, LENGTH, False)


@triton.jit
def _convolve(
    token,
    channel,
    factors,
    source,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    LENGTH: tl.constexpr,
    FROM_RING: tl.constexpr,
):
    """Return the convolution at some tokens, [tokens, channels], in float32. factors: weights, and biases"""
    weight_ptr, bias_ptr = factors
    out = tl.zeros([token.shape[0], channel.shape[0]], tl.float32)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + channel, mask=channel < CHANNELS, other=0.0).to(tl.float32)[None, :]
    for back in tl.static_range(WIDTH - 1, -1, -1):
        x = _inputs_of(token - back, channel, source, CHANNELS, LENGTH, FROM_RING)
        weight = tl.load(weight_ptr + channel * WIDTH + WIDTH - 1 - back, mask=channel < CHANNELS, other=0.0)
        out += x.to(tl.float32) * weight.to(tl.float32)[None, :]
    return out


@triton.jit
def _keep(
    slot,
    token,
    channel,
    source,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    LENGTH: tl.constexpr,
    FROM_RING: tl.constexpr,
):
    """Write the inputs of some tokens, of which the first WIDTH count, to a slot."""
    _, inputs_ptr, begin, _, start, _, _ = source
    x = _inputs_of(token, channel, source, CHANNELS, LENGTH, FROM_RING)
    tl.debug_barrier()  # all threads have read what the slot had
    entry = slot * LENGTH + (start + token - begin + LENGTH) % LENGTH
    mask = (tl.arange(0, token.shape[0]) < WIDTH)[:, None] & (channel < CHANNELS)
    tl.store(inputs_ptr + entry[:, None] * CHANNELS + channel, x, mask=mask)


@triton.jit
def _inputs_of(token, channel, source, CHANNELS: tl.constexpr, LENGTH: tl.constexpr, FROM_RING: tl.constexpr):
    """Return the inputs, [tokens, channels], of tokens; FROM_RING: some may lie before the step's first one."""
    x_ptr, inputs_ptr, begin, end, start, initial, x_stride = source
    mask = (channel < CHANNELS)[None, :]
    is_new = (token >= begin) & (token < end)
    x = tl.load(x_ptr + token.to(tl.int64)[:, None] * x_stride + channel, mask=is_new[:, None] & mask, other=0.0)
    if FROM_RING:
        position = start + token - begin
        is_old = (token < begin) & (position >= tl.where(initial >= 0, 0, start))
        entry = initial.to(tl.int64) * LENGTH + tl.maximum(position, 0) % LENGTH
        old = tl.load(inputs_ptr + entry[:, None] * CHANNELS + channel, mask=is_old[:, None] & mask, other=0.0)
        x = tl.where((token < begin)[:, None], old, x)
    return x
