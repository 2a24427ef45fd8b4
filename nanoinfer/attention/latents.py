"""How a prompt's tokens meet latents: as the rows of a decode step do, or by keys and values that are made of these."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from nanoinfer.attention import AttentionBackend
from nanoinfer.attention.context import Context, GroupContext, PackedQueries

# A query that meets latents costs more than one that meets keys, but these have to be made, of each latent. So few
# queries for a latent meet it as it is. A GPU's rows read latents one by one: there the number is calculated.
QUERIES_OF_A_ROW = 16
LATENTS_AT_ONCE = 1 << 16  # of several sequences, so that what is made of them takes little memory


@dataclass(slots=True)
class Made:
    """Neighbouring sequences of a prefill step, for whose contexts keys and values are made.

    tokens: theirs in the step
    pages: [pages] int64, those of the cache that hold their contexts, one after another
    context: the step's, of these sequences alone
    group: of what is made, a page for each page of latents
    """

    tokens: slice
    pages: Tensor
    context: Context
    group: GroupContext


def plan_prefill(
    context: Context, group: GroupContext, block_size: int, backend: AttentionBackend, few: float
) -> Context | list[Made]:
    """Return how the sequences of a prefill step attend: to latents, as in this step, or in these parts to keys.

    group: of latents, whose blocks have block_size tokens
    few: up to so many queries for a latent meet it, where the backend's `prefill` takes latents
    """
    packed = context.prefill
    assert packed is not None
    lens = list(zip(packed.query_lens, packed.context_lens, strict=True))
    pairs = sum(queries * (2 * keys - queries) // 2 for queries, keys in lens)
    if pairs <= (few if backend.prefills_latents else QUERIES_OF_A_ROW) * sum(packed.context_lens):
        if backend.prefills_latents:
            return context
        rows = _as_rows(context, packed, group)
        backend.prepare_decode(rows)
        return rows
    cuts, latents = [0], 0
    for number, keys in enumerate(packed.context_lens):
        if latents and latents + keys > LATENTS_AT_ONCE:
            cuts.append(number)
            latents = 0
        latents += keys
    return [_make(context, packed, group, range(*cut), block_size) for cut in pairwise([*cuts, len(lens)])]


def _as_rows(context: Context, packed: PackedQueries, group: GroupContext) -> Context:
    """Return a decode step of which each token is a row."""
    places = torch.arange(len(context.positions), dtype=torch.int32, device=context.positions.device)
    sequences = torch.searchsorted(packed.cu_query_lens[1:], places, right=True)
    own = GroupContext(group.slot_mapping, group.block_tables[sequences])
    lens = context.positions + 1
    return Context(context.layers, [own], context.positions, lens, context.max_context_len)


def _make(context: Context, packed: PackedQueries, group: GroupContext, sequences: range, block_size: int) -> Made:
    """sequences: their numbers in the step"""
    some, past = slice(sequences.start, sequences.stop), slice(sequences.start, sequences.stop + 1)
    query_lens, context_lens = packed.query_lens[some], packed.context_lens[some]
    counts = [-(-keys // block_size) for keys in context_lens]
    lens, tables = context.context_lens[some], group.block_tables[some]
    ends = ((lens + (block_size - 1)) // block_size).cumsum(0)
    places = torch.arange(sum(counts), device=ends.device)
    owners = torch.searchsorted(ends, places, right=True)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    pages = tables[owners, places - starts[owners]].long()
    made = starts[:, None] + torch.arange(max(counts), device=ends.device)
    first = sum(packed.query_lens[: sequences.start])
    own = replace(
        packed,
        query_lens=query_lens,
        context_lens=context_lens,
        cu_query_lens=packed.cu_query_lens[past] - first,
        cu_context_lens=packed.cu_context_lens[past] - sum(packed.context_lens[: sequences.start]),
        is_long=packed.is_long[some],
        divided=None,
        ends=None,
    )
    return Made(
        slice(first, first + sum(query_lens)),
        pages,
        Context(context.layers, [], context.positions, lens, context.max_context_len, own),
        GroupContext(group.slot_mapping, made.int()),
    )
