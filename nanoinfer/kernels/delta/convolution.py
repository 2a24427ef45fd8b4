"""Causal convolutions of each channel by itself, over inputs that a ring remembers.

A slot of the ring has the last `width` inputs of a sequence. The input of the token at position p is at p % width, so
that a step writes one entry and reads the others. What stands for a position below 0 counts as 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.kernels.delta.chunks import CHUNK, Chunks


def convolve_rows(x: Tensor, weight: Tensor, inputs: Tensor, slots: Tensor, positions: Tensor, silu: bool) -> Tensor:
    """Convolve the next token of each row with those before it, and remember it.

    x: [rows, channels]; weight: [channels, width], the token's own factor last
    inputs: [slots, width, channels], the ring
    slots, positions: [rows] int32, a row's slot and its token's position; a slot of -1 is an empty row
    silu: whether SiLU follows
    Returns [rows, channels] in x's dtype; what empty rows get has no meaning.
    """
    return convolve_rows_reference(x, weight, inputs, slots, positions, silu)


def convolve_chunks(x: Tensor, weight: Tensor, inputs: Tensor, chunks: Chunks, silu: bool) -> Tensor:
    """Convolve the tokens of a prefill step, and remember the last ones of sequences and before snapshots.

    x: [tokens, channels], may be some columns of a wider matrix; weight, inputs, silu: as for convolve_rows
    Returns [tokens, channels] in x's dtype.
    """
    return convolve_chunks_reference(x, weight, inputs, chunks, silu)


def convolve_rows_reference(
    x: Tensor, weight: Tensor, inputs: Tensor, slots: Tensor, positions: Tensor, silu: bool
) -> Tensor:
    """convolve_rows in torch."""
    width = weight.shape[1]
    filled = slots >= 0
    inputs[slots[filled].long(), positions[filled] % width] = x[filled]
    window = _recall(inputs, slots, positions + 1, width)
    window[:, -1] = x
    return _activate((window.float() * weight.float().T).sum(dim=1), silu).to(x.dtype)


def convolve_chunks_reference(x: Tensor, weight: Tensor, inputs: Tensor, chunks: Chunks, silu: bool) -> Tensor:
    """convolve_chunks in torch."""
    width = weight.shape[1]
    before = _recall(inputs, chunks.initial, chunks.starts, width - 1)
    bounds = chunks.cu_lens.tolist()
    rows = [torch.cat([past, x[i:j]]) for past, i, j in zip(before, bounds[:-1], bounds[1:], strict=True)]
    for seq, (row, start, slot) in enumerate(zip(rows, chunks.starts.tolist(), chunks.final.tolist(), strict=True)):
        _remember(inputs, slot, row, start + bounds[seq + 1] - bounds[seq])
    for seq, first, slot in zip(
        chunks.seqs.tolist(), chunks.first_tokens.tolist(), chunks.snapshots.tolist(), strict=True
    ):
        end = first - bounds[seq] + CHUNK
        _remember(inputs, slot, rows[seq][: width - 1 + end], int(chunks.starts[seq]) + end)
    windows = torch.cat([row.unfold(0, width, 1) for row in rows])
    return _activate((windows.float() * weight.float()).sum(dim=2), silu).to(x.dtype)


def _recall(inputs: Tensor, slots: Tensor, ends: Tensor, count: int) -> Tensor:
    """Return the inputs of `count` positions before each end, [rows, count, channels]; 0 where there are none."""
    width = inputs.shape[1]
    positions = ends.unsqueeze(1) + torch.arange(-count, 0, device=ends.device)
    known = (positions >= 0) & (slots >= 0).unsqueeze(1)
    return inputs[slots.clamp(min=0).long().unsqueeze(1), positions % width].where(known.unsqueeze(2), 0)


def _remember(inputs: Tensor, slot: int, row: Tensor, end: int) -> None:
    """Write the last inputs before position `end`, which a row ends with, to a slot, if it is one."""
    width = inputs.shape[1]
    if slot >= 0:
        inputs[slot, torch.arange(end - width, end, device=row.device) % width] = row[-width:]


def _activate(x: Tensor, silu: bool) -> Tensor:
    return F.silu(x) if silu else x
