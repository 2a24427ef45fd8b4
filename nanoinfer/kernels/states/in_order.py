"""States whose sums have one order: the tokens since a boundary stand beside a matrix as the layer's kernels read them.

A token is then computed with those of its chunk, from the chunk's beginning on, in the same products of 64 tokens,
whether a prompt has it or a decode step does. What a row of such a product sums up are its own token and those before
it: the later ones add zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.delta.chunks import CHUNK, Chunks
from nanoinfer.kernels.launch import cdiv, next_power_of_2
from nanoinfer.kernels.states.memory import StateRows, TokenRings

COLUMNS = 12  # of Spans.seqs
BLOCK = 1024  # numbers of a token that a program copies


class Spans(NamedTuple):
    """The tokens that a step's sequences compute, cut into chunks, for layers that have TokenRings. All are int32.

    seqs: [seqs, COLUMNS], of each sequence: its first chunk; how many tokens its chunks have, how many of these are
        known, and how many the first ones are that an earlier step has computed; the slot whose matrices stand before
        them, or -1; the slot that gets those behind the last whole chunk, or -1; the place of its first own token among
        the step's, and what makes places of its other ones' numbers; the slot of its ring, the position of its first
        own token, and from which of its own tokens up to which the ring gets them
    bounds: [chunks + 1]; behind entry c + 1 of the tokens that kernels read, chunk c has none
    chunks: [chunks], 0, 1, ...; first_tokens: [chunks], where each begins
    snapshots: [chunks], one more slot that gets the matrices behind a whole chunk, or -1
    earlier: of a prefill step that goes on amid chunks; None: it does not
    in_rings: the tokens of all chunks are read from the rings, which is so in decode steps
    """

    seqs: Tensor
    bounds: Tensor
    chunks: Tensor
    first_tokens: Tensor
    snapshots: Tensor
    earlier: Earlier | None
    in_rings: bool

    @property
    def cuts(self) -> tuple[Tensor, Tensor, Tensor]:
        """The chunks as kernels that take one alone read them: cu_lens, seqs and first_tokens of Chunks."""
        return self.bounds, self.chunks, self.first_tokens

    def gather(self, rings: TokenRings, tokens: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
        """Let rings have the step's tokens that are to stand beside matrices; return the tokens that chunks have.

        tokens: [tokens, channels], convolved; gates: [tokens, numbers]
        """
        kept = [ring.flatten(0, 1) for ring in rings[1:]]
        read = [tokens, gates]
        if self.earlier is not None:
            read = [self.earlier.join(ring, new) for ring, new in zip(kept, read, strict=True)]
        _keep(rings, tokens, gates, self.seqs)
        tokens, gates = kept if self.in_rings else read
        return tokens, gates


class Earlier(NamedTuple):
    """Where tokens stand of chunks amid which a prefill step goes on. All are int64.

    sources, targets: [n], entries of all rings: of earlier tokens, and of the copies that the final slots get
    places: [n], of these among the tokens of all chunks; own: [tokens], those of the step's
    """

    sources: Tensor
    targets: Tensor
    places: Tensor
    own: Tensor

    def join(self, ring: Tensor, new: Tensor) -> Tensor:
        """Return the tokens of all chunks, the earlier ones included, and copy these in their ring."""
        joined = new.new_empty(len(self.places) + len(self.own), new.shape[1])
        earlier = ring[self.sources]
        joined[self.places], joined[self.own] = earlier, new
        ring[self.targets] = earlier
        return joined


def spans_of_rows(rows: StateRows, ring: int) -> Spans:
    """Return the spans of a decode step; ring: how many tokens the layers' rings hold."""
    slots, before = rows.slots, rows.boundaries
    count, device = len(slots), slots.device
    position = rows.positions[:count]
    is_row = slots >= 0
    old = (position - before).where(is_row, 0)
    known = (old + 1).where(is_row, 0)
    guesses = torch.zeros_like(known) if rows.counts is None else rows.counts.where(is_row, 0)
    number = torch.arange(count, dtype=torch.int32, device=device)
    behind = number if rows.first is None else count + rows.first - 1
    final = slots.where(known >= CHUNK, -1)
    offset = torch.arange(0, ring, CHUNK, dtype=torch.int32, device=device)
    total = known + guesses
    where = number * len(offset), total, known, old, slots, final, number, behind
    own = slots, position, torch.zeros_like(known), (guesses + 1).where(is_row, 0)
    first = (slots.clamp(min=0) * ring).unsqueeze(1) + (before.unsqueeze(1) + offset) % ring
    ends = first + (total.unsqueeze(1) - offset).clamp(0, CHUNK)
    chunks = torch.arange(first.numel(), dtype=torch.int32, device=device)
    bounds = torch.cat([chunks[:1], ends.flatten()])
    snapshots = torch.full_like(chunks, -1)
    return Spans(torch.stack([*where, *own], 1), bounds, chunks, first.flatten(), snapshots, None, True)


class Cut(NamedTuple):
    """How a prefill step's sequences are cut, as the host knows it. All are int32, on the device.

    seqs: four numbers of each sequence: where its first chunk begins, and that chunk's number; its first own token
        among the step's; and its end
    first_tokens, bounds, snapshots: of each chunk, as Spans has them, but for the first bound
    earlier: three numbers of each earlier token, and own: as Earlier has them
    """

    seqs: Tensor
    first_tokens: Tensor
    bounds: Tensor
    snapshots: Tensor
    earlier: Tensor
    own: Tensor


def spans_of_chunks(cut: Cut, chunks: Chunks) -> Spans:
    """Return the spans of a prefill step; chunks: how its own tokens are cut."""
    begins, first_chunks, places, ends = cut.seqs.view(-1, 4).unbind(1)
    starts, boundaries, final = chunks.starts, chunks.boundaries, chunks.final
    total = ends - boundaries
    kept = (ends // CHUNK * CHUNK - starts).clamp(min=0), ends - starts
    where = first_chunks + (boundaries - begins) // CHUNK, total, total, starts - boundaries, chunks.initial, final
    of_ring = final, starts, *(numbers.where(final >= 0, 0) for numbers in kept)
    numbers = torch.arange(len(cut.bounds), dtype=torch.int32, device=cut.bounds.device)
    earlier = None
    if cut.earlier.numel():
        sources, targets, entries = cut.earlier.view(-1, 3).T.long()
        earlier = Earlier(sources, targets, entries, cut.own.long())
    seqs, bounds = torch.stack([*where, places, places, *of_ring], 1), torch.cat([numbers[:1], cut.bounds])
    return Spans(seqs, bounds, numbers, cut.first_tokens, cut.snapshots, earlier, False)


def _keep(rings: TokenRings, tokens: Tensor, gates: Tensor, seqs: Tensor) -> None:
    """Let rings have the step's tokens that are to stand beside matrices; as for Spans.gather."""
    channels, numbers = tokens.shape[1], gates.shape[1]
    _keep_kernel[(cdiv(channels, BLOCK), len(seqs))](
        tokens,
        gates,
        rings.tokens,
        rings.gates,
        seqs,
        tokens.stride(0),
        gates.stride(0),
        CHANNELS=channels,
        NUMBERS=numbers,
        RING=rings.ring,
        COLUMNS=COLUMNS,
        BLOCK=BLOCK,
        BLOCK_N=next_power_of_2(numbers),
        enable_fp_fusion=True,
    )


@triton.jit
def _keep_kernel(
    tokens_ptr,
    gates_ptr,
    kept_tokens_ptr,
    kept_gates_ptr,
    seqs_ptr,
    tokens_stride,
    gates_stride,
    CHANNELS: tl.constexpr,
    NUMBERS: tl.constexpr,
    RING: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    part, seq_ptr = tl.program_id(0), seqs_ptr + tl.program_id(1) * COLUMNS
    channel, n = part * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_N)
    slot, start = tl.load(seq_ptr + 8).to(tl.int64), tl.load(seq_ptr + 9)
    for token in range(tl.load(seq_ptr + 10), tl.load(seq_ptr + 11)):
        place, entry = place_of(seq_ptr, token).to(tl.int64), slot * RING + (start + token) % RING
        x = tl.load(tokens_ptr + place * tokens_stride + channel, mask=channel < CHANNELS)
        tl.store(kept_tokens_ptr + entry * CHANNELS + channel, x, mask=channel < CHANNELS)
        if part == 0:
            gates = tl.load(gates_ptr + place * gates_stride + n, mask=n < NUMBERS)
            tl.store(kept_gates_ptr + entry * NUMBERS + n, gates, mask=n < NUMBERS)


@triton.jit
def place_of(seq_ptr, token):
    """Return the places of a sequence's own tokens among the step's. seq_ptr: to its numbers, as Spans has them"""
    return tl.where(token == 0, tl.load(seq_ptr + 6), tl.load(seq_ptr + 7) + token)


@triton.jit
def load_span(seq_ptr):
    """Return a sequence's first chunk, how many tokens its chunks have, how many are known, and are computed already.

    Behind these: the slots whose matrices it reads, and gets, int64. seq_ptr: to its numbers, as Spans has them
    """
    tokens = tl.load(seq_ptr), tl.load(seq_ptr + 1), tl.load(seq_ptr + 2), tl.load(seq_ptr + 3)
    return tokens, tl.load(seq_ptr + 4).to(tl.int64), tl.load(seq_ptr + 5).to(tl.int64)
