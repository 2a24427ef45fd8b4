"""PrefillInputs: a prefill step's tokens on the device, and what its layers need to know of them."""

from __future__ import annotations

from array import array
from itertools import islice

import numpy as np
import numpy.typing as npt

from nanoinfer.attention.context import Context, GroupContext, PackedQueries, StateContext
from nanoinfer.kernels.attention.prefill.prefill_plan import DividedPrefill, divide
from nanoinfer.kernels.delta.chunks import CHUNK, Chunks, cut
from nanoinfer.kernels.states.in_order import Cut, spans_of_chunks
from nanoinfer.runner.memory.kv_cache import KVCache
from nanoinfer.runner.memory.state_pool import StatePool
from nanoinfer.runner.message import ChunkMessage, ChunkStates, JoinMessage
from nanoinfer.runner.steps.cut_in_order import cut_in_order
from nanoinfer.runner.transfer import upload, upload_all

Numbers = npt.NDArray[np.int32]

TABLE_STEP = 16  # a table has a multiple of so many columns: for other strides, Triton would compile anew


class PrefillInputs:
    """A prefill step's tokens on the device, packed one sequence after another.

    token_ids: [tokens] int32
    context: the tokens' positions, slots and block tables, for the layers
    last_indices: [joins] int64, where the last token of each complete prompt stands in token_ids
    last_positions: [joins] int32, the positions of these tokens
    join_tables: for each group of layers, [joins, columns] int32, in pages
    slots: [joins] int32, for states
    temperatures: [joins] float32; seeds: [joins] int64
    deltas: [joins] int32, see JoinMessage.delta; None: they are zeros
    adapters: [tokens] int32, the slots of their adapters, -1 for none; None: no chunk has one
    copied_blocks, copied_states: [2, copies] int64, the blocks or slots to copy, and their copies
    left: [2, slots] int64, the slots that get states, and the boundaries at which matrices stand there then
    """

    def __init__(
        self,
        chunks: list[ChunkMessage],
        joins: list[JoinMessage],
        kv_cache: KVCache,
        states: StatePool | None = None,
        whole_images: bool = False,
        may_adapt: bool = False,
        in_sections: bool = False,
    ) -> None:
        """states: given if layers have some; whole_images: some layer lets an image's tokens see each other.

        may_adapt: chunks may have adapters; in_sections: all tokens have three rotary positions, those of text, too
        """
        query_lens = [count for chunk in chunks for count in chunk.lens]
        starts = [chunk.start for chunk in chunks for _ in chunk.lens]
        context_lens = [start + count for start, count in zip(starts, query_lens, strict=True)]
        arrays = [*_pack_chunks(chunks, query_lens, starts), array("i", context_lens), *_pack_joins(chunks, joins)]
        widths = []
        for index, (group, step) in enumerate(zip(kv_cache.layout.groups, kv_cache.steps, strict=True)):
            widths.append(TABLE_STEP * -(-max(len(chunk.block_tables[index]) for chunk in chunks) // TABLE_STEP))
            arrays += _pack_group(chunks, joins, index, group.block_size, step, widths[-1])
        if states is not None:
            arrays += _pack_states(chunks, states.ring)
        division = divide(query_lens, context_lens) if widths else None
        if division is not None:
            arrays += [division.rows, division.cu_query_lens, division.context_lens]
        has_sections = in_sections or any(
            chunk.media is not None and chunk.media.positions is not None for chunk in chunks
        )
        if has_sections:
            arrays.append(_pack_sections(chunks))
        has_ends = whole_images and any(chunk.media is not None and chunk.media.images for chunk in chunks)
        if has_ends:
            arrays.append(_pack_ends(chunks))
        has_types = any(chunk.read is not None and chunk.read.separator is not None for chunk in chunks)
        if has_types:
            arrays.append(_pack_types(chunks))
        has_adapters = may_adapt and any(chunk.adapter >= 0 for chunk in chunks)
        if has_adapters:
            arrays.append(_pack_adapters(chunks))
        on_device = iter(upload_all(arrays, kv_cache.device))
        self.token_ids, positions, cu_queries, cu_contexts, lens = islice(on_device, 5)
        sampled, copies, self.slots, copied_states = islice(on_device, 4)
        groups, self.join_tables = [], []
        for width in widths:
            slots, tables, join_tables = islice(on_device, 3)
            groups.append(GroupContext(slots, tables.view(-1, width)))
            self.join_tables.append(join_tables.view(-1, width))
        state_context = None
        if states is not None:
            begins, initial, final, seqs, firsts, snapshots, stretches, left = islice(on_device, 8)
            self.left = left.view(2, -1).long()
            boundaries = states.boundaries[initial.clamp(min=0).long()].where(initial >= 0, begins)
            standing = initial.where(boundaries == begins, final)
            may_fold = any(chunk.states is not None and chunk.states.source >= 0 for chunk in chunks)
            where, cuts = (cu_queries, begins, initial, final), (seqs, firsts, snapshots, stretches)
            own = Chunks(*where, *cuts, boundaries, standing, may_fold)
            spans = None if states.ring is None else spans_of_chunks(Cut(*islice(on_device, 6)), own)
            state_context = StateContext(states.layers, chunks=own, spans=spans)
        divided = None
        if division is not None:
            rows, *piece_lens = islice(on_device, 3)
            divided = DividedPrefill(division.stretches, division.max_query_len, *piece_lens)
            for group_context in groups:
                group_context.divided_tables = group_context.block_tables[rows]
        rotary = next(on_device).view(3, -1) if has_sections else None
        ends = next(on_device) if has_ends else None
        types = next(on_device) if has_types else None
        self.adapters = next(on_device) if has_adapters else None
        are_long = [chunk.is_long for chunk in chunks for _ in chunk.lens]
        packed = PackedQueries(query_lens, context_lens, cu_queries, cu_contexts, are_long, divided, ends)
        what = kv_cache.layers, groups, positions, lens, max(context_lens), packed, state_context
        self.context = Context(*what, types=types, rotary=rotary)
        self.last_indices = cu_queries[1:][sampled].long() - 1
        self.last_positions = lens[sampled] - 1
        self.copied_blocks, self.copied_states = (pairs.view(-1, 2).T.long() for pairs in (copies, copied_states))
        self.temperatures = upload(array("f", [join.temperature for join in joins]), kv_cache.device)
        deltas = array("i", [join.delta for join in joins])
        self.deltas = upload(deltas, kv_cache.device) if any(deltas) else None
        self.seeds = upload(array("q", [join.seed for join in joins]), kv_cache.device)


def _pack_chunks(chunks: list[ChunkMessage], lens: list[int], starts: list[int]) -> list[array[int] | Numbers]:
    """Return the chunks' tokens and positions, and the sums of two lengths.

    lens, starts: of each text, how many tokens the chunks have, and the position of the first
    The sums say where each text's queries begin and the last one's end, and the same of contexts laid end to end.
    """
    tokens = array("i")
    for chunk in chunks:
        tokens.extend(chunk.token_ids)
    counts, firsts = np.array(lens, dtype=np.int32), np.array(starts, dtype=np.int32)
    cu_queries, cu_contexts = (np.zeros(len(lens) + 1, dtype=np.int32) for _ in range(2))
    counts.cumsum(out=cu_queries[1:])
    (firsts + counts).cumsum(out=cu_contexts[1:])
    positions = np.arange(len(tokens), dtype=np.int32) + (firsts - cu_queries[:-1]).repeat(counts)
    return [tokens, positions, cu_queries, cu_contexts]


def _pack_sections(chunks: list[ChunkMessage]) -> array[int]:
    """Return the chunks' rotary positions, [3, tokens]; for a chunk without media they are its tokens' places."""
    positions = array("i")
    for part in range(3):
        for chunk in chunks:
            count, media = len(chunk.token_ids), chunk.media
            if media is None or media.positions is None:
                positions.extend(range(chunk.start, chunk.start + count))
            else:
                positions.extend(media.positions[part * count : (part + 1) * count])
    return positions


def _pack_ends(chunks: list[ChunkMessage]) -> array[int]:
    """Return where that ends which each token sees: behind it, or behind its image, which ends in its chunk."""
    ends = array("i")
    for chunk in chunks:
        begin = len(ends)
        ends.extend(range(chunk.start + 1, chunk.start + 1 + len(chunk.token_ids)))
        for part in [] if chunk.media is None else chunk.media.images:
            first, behind = begin + part.place, part.place + part.length
            ends[first : begin + behind] = array("i", [chunk.start + behind]) * part.length
    return ends


def _pack_types(chunks: list[ChunkMessage]) -> array[int]:
    """Return 1 for each token of a pair's second text, and 0 for all others."""
    types = array("i")
    for chunk in chunks:
        begin, separator = 0, None if chunk.read is None else chunk.read.separator
        for count in chunk.lens:
            tokens = chunk.token_ids[begin : begin + count]
            first = count if separator is None or separator not in tokens else tokens.index(separator) + 1
            types.extend([0] * first + [1] * (count - first))
            begin += count
    return types


def _pack_adapters(chunks: list[ChunkMessage]) -> array[int]:
    """Return the slots of the adapters of the chunks' tokens."""
    adapters = array("i")
    for chunk in chunks:
        adapters.extend([chunk.adapter] * len(chunk.token_ids))
    return adapters


def _pack_joins(chunks: list[ChunkMessage], joins: list[JoinMessage]) -> list[array[int]]:
    """Return the numbers of the chunks that the joins end, the blocks to copy, the joins' slots, and those to copy."""
    sampled, copies, slots, copied_states = array("i"), array("i"), array("i"), array("i")
    for join in joins:
        sampled.append(join.chunk)
        slots.append(join.slot)
        for pair in join.copied_blocks:
            copies.extend(pair)
        states = chunks[join.chunk].states
        if states is not None and join.slot != states.slot:
            copied_states.extend((states.slot, join.slot))
    return [sampled, copies, slots, copied_states]


def _pack_states(chunks: list[ChunkMessage], ring: int | None) -> list[array[int]]:
    """Return the starts, sources and own slots of the chunks, how kernels cut these (see Chunks), and `left`.

    ring: StatePool.ring; if there is one, Cut comes behind these
    """
    states = [chunk.states or ChunkStates(-1, -1) for chunk in chunks]
    spans = [
        (chunk.start, chunk.start + len(chunk.token_ids), planned)
        for chunk, planned in zip(chunks, states, strict=True)
    ]
    left: dict[int, int] = {}
    for start, end, planned in spans:
        begin = 0 if ring else start % CHUNK  # matrices move from here in whole chunks
        left[planned.slot] = end - (end - begin) % CHUNK
        left |= {slot: position for position, slot in planned.snapshots.items()}
    left.pop(-1, None)
    return [
        array("i", [chunk.start for chunk in chunks]),
        array("i", [planned.source for planned in states]),
        array("i", [planned.slot for planned in states]),
        *cut((start, end, planned.snapshots) for start, end, planned in spans),
        array("i", [*left.keys(), *left.values()]),
        *([] if ring is None else cut_in_order(spans, ring)),
    ]


def _pack_group(
    chunks: list[ChunkMessage], joins: list[JoinMessage], index: int, block_size: int, step: int, width: int
) -> list[array[int]]:
    """Return the slots of the chunks' tokens, the chunks' block tables and those of the joins, for one group of layers.

    index: the group's; step: pages from one block to the next; width: columns of a table
    """
    slots, tables, join_tables = array("i"), array("i"), array("i")
    for chunk in chunks:
        pages = _pages(chunk.block_tables[index], step)
        slots.extend(_slots(pages, chunk.start, chunk.start + len(chunk.token_ids), block_size))
        tables.extend(pages + [0] * (width - len(pages)))
    for join in joins:
        pages = _pages(join.block_tables[index], step)
        join_tables.extend(pages + [0] * (width - len(pages)))
    return [slots, tables, join_tables]


def _pages(block_table: list[int], step: int) -> list[int]:
    return block_table if step == 1 else [block * step for block in block_table]


def _slots(pages: list[int], start: int, end: int, block_size: int) -> array[int]:
    """Return the cache slots of tokens `start` to `end`."""
    slots = array("i")
    while start < end:
        page, offset = pages[start // block_size], start % block_size
        count = min(block_size - offset, end - start)
        slots.extend(range(page * block_size + offset, page * block_size + offset + count))
        start += count
    return slots
