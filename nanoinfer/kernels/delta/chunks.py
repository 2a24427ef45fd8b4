"""Chunks: the tokens of a prefill step, cut where the kernels of layers with states cut them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

CHUNK = 64  # tokens: a sequence is cut at multiples of this, from its beginning
STRETCH = 32  # chunks that follow one another, which a program may have


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """A step's tokens, packed one sequence after another. What a sequence computes begins at a multiple of CHUNK.

    It may begin elsewhere if no snapshot is taken. What is left behind its last whole chunk stands beside matrices.

    All are int32 on the device. A slot of -1 stands for none.

    cu_lens: [seqs + 1], where each sequence's tokens begin among the step's, and the last one's end
    starts: [seqs], the position of a sequence's first token in this step
    initial: [seqs], the slot of the states before that token; none: they are zeros, or the convolution's first inputs
    final: [seqs], the slot that gets the states behind a sequence's last token in this step; may be `initial`
    seqs: [chunks], the sequence whose tokens a chunk holds; a sequence's chunks are neighbours, in order
    first_tokens: [chunks], the first of the chunk's tokens among the step's
    snapshots: [chunks], one more slot, that gets the states behind the chunk's last token; the chunk is whole then
    stretches: [stretches], the first chunk of each; STRETCH of a sequence's chunks are one, and those left at its end.
        Those of sequences that have several come first
    boundaries: [seqs], the position at which the matrices of `initial` stand; without a slot the first one
    standing: [seqs], the slot whose matrices stand at that: `initial`, or `final` if they do so once tails are folded
    may_fold: whether some sequence may have a tail: tokens between its boundary and the first position
    """

    cu_lens: Tensor
    starts: Tensor
    initial: Tensor
    final: Tensor
    seqs: Tensor
    first_tokens: Tensor
    snapshots: Tensor
    stretches: Tensor
    boundaries: Tensor
    standing: Tensor
    may_fold: bool

    def end(self, seq: int) -> int:
        """Return the position behind a sequence's last token in this step."""
        return int(self.starts[seq] + self.cu_lens[seq + 1] - self.cu_lens[seq])


def cut(spans: Iterable[tuple[int, int, dict[int, int]]]) -> tuple[array[int], array[int], array[int], array[int]]:
    """Cut sequences into chunks; returns Chunks.seqs, first_tokens, snapshots and stretches.

    spans: of each sequence: the first position, the end, and snapshots: position -> the slot that gets the states
        behind the tokens before it
    """
    seqs, first_tokens, snapshots, stretches, whole = (array("i") for _ in range(5))
    token = 0
    for seq, (start, end, slots) in enumerate(spans):
        assert start % CHUNK == 0 or not slots
        count = -((start - end) // CHUNK)
        (stretches if count > STRETCH else whole).extend(range(len(seqs), len(seqs) + count, STRETCH))
        for first in range(start, end, CHUNK):
            seqs.append(seq)
            first_tokens.append(token + first - start)
            snapshots.append(slots.get(first + CHUNK, -1))
        token += end - start
    return seqs, first_tokens, snapshots, stretches + whole


@triton.jit
def chunks_before(seqs_ptr, num_chunks, seq):
    """Return how many chunks stand before a sequence's."""
    count = 0
    for start in range(0, num_chunks, 256):
        chunk = start + tl.arange(0, 256)
        other = tl.load(seqs_ptr + chunk, mask=chunk < num_chunks, other=seq)
        count += tl.sum((other < seq).to(tl.int32), axis=0)
    return count
