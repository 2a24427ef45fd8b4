"""How the host cuts a prefill step's sequences, if sums of states have one order."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from nanoinfer.kernels.delta.chunks import CHUNK
from nanoinfer.runner.message import ChunkStates


def cut_in_order(spans: Iterable[tuple[int, int, ChunkStates]], ring: int) -> list[array[int]]:
    """Cut sequences into chunks, from the first multiple of CHUNK on at which their matrices may stand; returns Cut.

    spans: of each sequence, its first position in this step, its end, and its states
    ring: how many tokens a ring holds: matrices stand no further back
    """
    seqs, first_tokens, bounds, snapshots, earlier, own = (array("i") for _ in range(6))
    token = place = 0
    for start, end, states in spans:
        begin = start if states.source < 0 else max(0, start // CHUNK * CHUNK - (ring - CHUNK))
        seqs.extend((begin, len(first_tokens), token, end))
        for position in range(begin, start):
            entries = (slot * ring + position % ring for slot in (states.source, states.slot))
            earlier.extend((*entries, place + position - begin))
        own.extend(range(place + start - begin, place + end - begin))
        for first in range(begin, end, CHUNK):
            first_tokens.append(place + first - begin)
            bounds.append(place + min(first + CHUNK, end) - begin)
            snapshots.append(states.snapshots.get(first + CHUNK, -1))
        token, place = token + end - start, place + end - begin
    return [seqs, first_tokens, bounds, snapshots, earlier, own]
