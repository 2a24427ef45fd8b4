"""How prompts meet latents: their tokens attend to these, or to keys and values that are made of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanoinfer.attention import AttentionBackend
from nanoinfer.attention.context import Context, GroupContext, PackedQueries

# A query that meets latents costs more than one that meets keys, but these have to be made, of each latent. So few
# queries for a latent meet it as it is. A GPU's rows read latents one by one: on an H200 keys are the faster from 48 to
# 70 queries on, in steps of 16 sequences, and from 128 to 220 on in those of one.
QUERIES_OF_A_ROW = 48
ROWS_AT_ONCE = 2048  # a plan of more rows takes Triton long to compile
LATENTS_AT_ONCE = 1 << 16  # of several sequences, so that what is made of them takes little memory


@dataclass(slots=True)
class Part:
    """Neighbouring sequences of a prefill step that attend alike.

    tokens: theirs in the step
    context: their own step, whose one group has the blocks to which they attend; a decode step has a row for each token
    pages: [pages] int64, those of the cache that hold their contexts, one after another; the blocks are those of keys
        and values that are made of these. None: the blocks are those of latents
    """

    tokens: slice
    context: Context
    pages: Tensor | None = None


def plan_prefill(
    context: Context, group: GroupContext, block_size: int, backend: AttentionBackend, few: float
) -> list[Part]:
    """Return the parts in which the sequences of a prefill step attend.

    group: of latents, whose blocks have block_size tokens
    few: up to so many queries for a latent meet it, where the backend's `prefill` takes latents
    """
    packed = context.prefill
    assert packed is not None
    limit = few if backend.prefills_latents else QUERIES_OF_A_ROW
    meets = [
        queries * (2 * keys - queries) <= 2 * limit * keys
        for queries, keys in zip(packed.query_lens, packed.context_lens, strict=True)
    ]
    parts = []
    for some, tokens in _cut(packed, meets):
        own = _some(context, packed, some, tokens)
        tables = group.block_tables[some.start : some.stop]
        if not meets[some.start]:
            parts.append(_made(own, tables, tokens, block_size))
            continue
        own.groups = [GroupContext(group.slot_mapping[tokens], tables)]
        if not backend.prefills_latents:
            own = _as_rows(own, tables)
            backend.prepare_decode(own)
        parts.append(Part(tokens, own))
    return parts


def _cut(packed: PackedQueries, meets: list[bool]) -> Iterator[tuple[range, slice]]:
    """Yield runs of sequences that attend alike, and their tokens."""
    first = begin = end = latents = 0
    for number, (queries, keys) in enumerate(zip(packed.query_lens, packed.context_lens, strict=True)):
        is_full = end + queries - begin > ROWS_AT_ONCE if meets[first] else latents + keys > LATENTS_AT_ONCE
        if number > first and (is_full or meets[number] != meets[first]):
            yield range(first, number), slice(begin, end)
            first, begin, latents = number, end, 0
        end, latents = end + queries, latents + keys
    yield range(first, len(meets)), slice(begin, end)


def _some(context: Context, packed: PackedQueries, sequences: range, tokens: slice) -> Context:
    """Return the step of some sequences alone, by their numbers in the step, without groups."""
    some, past = slice(sequences.start, sequences.stop), slice(sequences.start, sequences.stop + 1)
    own = replace(
        packed,
        query_lens=packed.query_lens[some],
        context_lens=packed.context_lens[some],
        cu_query_lens=packed.cu_query_lens[past] - tokens.start,
        cu_context_lens=packed.cu_context_lens[past] - sum(packed.context_lens[: sequences.start]),
        is_long=packed.is_long[some],
        divided=None,
        ends=None,
    )
    lens = context.context_lens[some]
    return Context(context.layers, [], context.positions[tokens], lens, max(own.context_lens), own)


def _as_rows(context: Context, tables: Tensor) -> Context:
    """Return a decode step of which each token of a prefill step is a row."""
    packed, positions = context.prefill, context.positions
    assert packed is not None
    places = torch.arange(len(positions), dtype=torch.int32, device=positions.device)
    sequences = torch.searchsorted(packed.cu_query_lens[1:], places, right=True)
    group = replace(context.groups[0], block_tables=tables[sequences])
    return Context(context.layers, [group], positions, positions + 1, context.max_context_len)


def _made(context: Context, tables: Tensor, tokens: slice, block_size: int) -> Part:
    """Return a part whose keys and values are made; tables: of its sequences' latents."""
    packed = context.prefill
    assert packed is not None
    counts = [-(-keys // block_size) for keys in packed.context_lens]
    ends = ((context.context_lens + (block_size - 1)) // block_size).cumsum(0)
    places = torch.arange(sum(counts), device=ends.device)
    owners = torch.searchsorted(ends, places, right=True)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    pages = tables[owners, places - starts[owners]].long()
    made = starts[:, None] + torch.arange(max(counts), device=ends.device)
    context.groups = [GroupContext(context.positions, made.int())]  # nothing is written
    return Part(tokens, context, pages)
