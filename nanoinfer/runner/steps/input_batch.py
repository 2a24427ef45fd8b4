"""InputBatch: the rows of the running batch, kept on the device so that a decode step needs nothing from the host."""

from __future__ import annotations

from array import array
from itertools import accumulate, islice

import torch
from torch import Tensor

from nanoinfer.attention.context import Context, GroupContext, PackedQueries
from nanoinfer.kernels.attention.prefill_plan import DividedPrefill, divide
from nanoinfer.kernels.attention.prefix_plan import SharedPrefixes
from nanoinfer.kernels.rows import advance_rows, locate_rows
from nanoinfer.runner.memory.kv_cache import KVCache
from nanoinfer.runner.message import ChunkMessage, DecodeMessage, JoinMessage, PrefillMessage
from nanoinfer.runner.transfer import upload, upload_all

TABLE_STEP = 16  # a table has a multiple of so many columns: for other strides, Triton would compile anew


class InputBatch:
    """One row for each running sequence, packed from row 0.

    last_tokens: [rows] int32, the token whose keys and values the next decode step computes
    positions: [rows] int32, that token's position in its sequence; -1 in an empty row
    drawn: [rows] int32, the tokens of the last draw; NO_TOKEN where the logits were not finite
    block_tables: [rows, columns] int32, in pages; one group's after another's, as `tables` divides them
    temperatures: [rows] float32; seeds: [rows] int64
    prefixes: those that rows share, if decode attention reads them once
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_blocks: list[int],
        kv_cache: KVCache,
        device: torch.device,
        prefixes: SharedPrefixes | None = None,
    ) -> None:
        """max_blocks: of a row, for each group of layers"""
        self.block_sizes, self.steps = [group.block_size for group in kv_cache.layout.groups], kv_cache.steps
        self.prefixes = prefixes
        self.device = device
        self.num_rows = 0
        self.last_tokens = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self.positions = torch.full((max_num_seqs,), -1, dtype=torch.int32, device=device)
        self.drawn = torch.zeros_like(self.last_tokens)
        self.block_tables = torch.zeros((max_num_seqs, sum(max_blocks)), dtype=torch.int32, device=device)
        self.tables = self.block_tables.split(max_blocks, dim=1)
        self._first_columns = [0, *accumulate(max_blocks)]
        self.temperatures = torch.zeros(max_num_seqs, dtype=torch.float32, device=device)
        self.seeds = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)

    def update(self, message: PrefillMessage | DecodeMessage) -> None:
        """Move rows and add blocks, as the message says, before its step runs."""
        if message.moves:
            flat = array("i", [row for move in message.moves for row in move])
            source, destination = upload(flat, self.device).view(-1, 2).T
            for rows in (self.last_tokens, self.positions, self.block_tables, self.temperatures, self.seeds):
                rows[destination] = rows[source]
        if message.num_rows < self.num_rows:
            self.positions[message.num_rows : self.num_rows] = -1
        self.num_rows = message.num_rows
        if isinstance(message, DecodeMessage):
            if message.new_blocks:
                self._add_blocks(message.new_blocks)
            if message.new_prefixes is not None:
                assert self.prefixes is not None
                shared = message.new_prefixes
                self.prefixes.fill(upload(self.prefixes.pack(shared.order, shared.runs), self.device))

    def _add_blocks(self, new_blocks: list[tuple[int, int, int, int]]) -> None:
        width = self.block_tables.shape[1]
        flat = array("q")
        for row, group, column, block in new_blocks:
            flat.extend((row * width + self._first_columns[group] + column, block * self.steps[group]))
        where, pages = upload(flat, self.device).view(-1, 2).T
        self.block_tables.view(-1).index_copy_(0, where, pages.int())

    def join(self, prompts: PrefillInputs, token_ids: Tensor) -> None:
        """Append a row for each prompt that a prefill step completes, with the token sampled for it."""
        joining = slice(self.num_rows, self.num_rows + len(token_ids))
        self.num_rows = joining.stop  # first: an interrupt from here on must not leave an uncounted row
        self.last_tokens[joining], self.drawn[joining] = token_ids.clamp(min=0), token_ids
        self.positions[joining] = prompts.sample_positions
        for table, joined in zip(self.tables, prompts.join_tables, strict=True):
            table[joining, : joined.shape[1]] = joined
        self.temperatures[joining] = prompts.temperatures
        self.seeds[joining] = prompts.seeds

    def decode_context(self, num_rows: int, kv_cache: KVCache, max_context_len: int, shares: bool) -> Context:
        """Return the context of a decode step over the first `num_rows` rows, computed on the device.

        shares: whether shared prefixes are read once
        """
        positions = self.positions[:num_rows]
        groups = []
        for table, block_size in zip(self.tables, self.block_sizes, strict=True):
            slots, context_lens = locate_rows(positions, table[:num_rows], block_size)
            groups.append(GroupContext(slots, table[:num_rows]))
        prefixes = self.prefixes if shares else None
        return Context(kv_cache.layers, groups, positions, context_lens, max_context_len, prefixes=prefixes)

    def advance(self, token_ids: Tensor) -> None:
        """Give the first rows their sampled tokens; empty rows stay empty."""
        num_rows = len(token_ids)
        advance_rows(self.last_tokens[:num_rows], self.positions[:num_rows], token_ids, self.drawn[:num_rows])


class PrefillInputs:
    """A prefill step's tokens on the device, packed one sequence after another.

    token_ids: [tokens] int32
    context: the tokens' positions, slots and block tables, for the layers
    last_indices: [joins] int64, where the last token of each complete prompt stands in token_ids
    sample_positions: [joins] int32, the positions of the tokens to be sampled
    join_tables: for each group of layers, [joins, columns] int32, in pages
    temperatures: [joins] float32; seeds: [joins] int64
    copied_blocks: [2, copies] int64, the blocks to copy, and their copies
    """

    def __init__(self, chunks: list[ChunkMessage], joins: list[JoinMessage], kv_cache: KVCache) -> None:
        query_lens = [len(chunk.token_ids) for chunk in chunks]
        context_lens = [chunk.start + count for chunk, count in zip(chunks, query_lens, strict=True)]
        arrays = [*_pack_chunks(chunks), array("i", context_lens), *_pack_joins(joins)]
        widths = []
        for index, (group, step) in enumerate(zip(kv_cache.layout.groups, kv_cache.steps, strict=True)):
            widths.append(TABLE_STEP * -(-max(len(chunk.block_tables[index]) for chunk in chunks) // TABLE_STEP))
            arrays += _pack_group(chunks, joins, index, group.block_size, step, widths[-1])
        division = divide(query_lens, context_lens)
        if division is not None:
            arrays += [division.rows, division.cu_query_lens, division.context_lens]
        on_device = iter(upload_all(arrays, kv_cache.device))
        self.token_ids, positions, cu_queries, cu_contexts, lens, sampled, copies = islice(on_device, 7)
        groups, self.join_tables = [], []
        for width in widths:
            slots, tables, join_tables = islice(on_device, 3)
            groups.append(GroupContext(slots, tables.view(-1, width)))
            self.join_tables.append(join_tables.view(-1, width))
        divided = None
        if division is not None:
            rows, *piece_lens = on_device
            divided = DividedPrefill(division.stretches, division.max_query_len, *piece_lens)
            for group_context in groups:
                group_context.divided_tables = group_context.block_tables[rows]
        are_long = [chunk.is_long for chunk in chunks]
        packed = PackedQueries(query_lens, context_lens, cu_queries, cu_contexts, are_long, divided)
        self.context = Context(kv_cache.layers, groups, positions, lens, max(context_lens), packed)
        self.last_indices = cu_queries[1:][sampled].long() - 1
        self.sample_positions = lens[sampled]
        self.copied_blocks = copies.view(-1, 2).T.long()
        self.temperatures = upload(array("f", [join.temperature for join in joins]), kv_cache.device)
        self.seeds = upload(array("q", [join.seed for join in joins]), kv_cache.device)


def _pack_chunks(chunks: list[ChunkMessage]) -> list[array[int]]:
    """Return the chunks' tokens and positions, and the sums of two lengths.

    The sums say where each chunk's queries begin and the last one's end, and the same of contexts laid end to end.
    """
    tokens, positions = array("i"), array("i")
    cu_queries, cu_contexts = array("i", [0]), array("i", [0])
    for chunk in chunks:
        end = chunk.start + len(chunk.token_ids)
        tokens.extend(chunk.token_ids)
        positions.extend(range(chunk.start, end))
        cu_queries.append(len(tokens))
        cu_contexts.append(cu_contexts[-1] + end)
    return [tokens, positions, cu_queries, cu_contexts]


def _pack_joins(joins: list[JoinMessage]) -> list[array[int]]:
    """Return the numbers of the chunks that the joins end, and the blocks to copy."""
    sampled, copies = array("i"), array("i")
    for join in joins:
        sampled.append(join.chunk)
        for pair in join.copied_blocks:
            copies.extend(pair)
    return [sampled, copies]


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
