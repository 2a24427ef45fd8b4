"""InputBatch: the rows of the running batch, kept on the device so that a decode step needs nothing from the host."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from nanoinfer.attention.context import Context, PackedQueries
from nanoinfer.kernels.attention.prefill_plan import DividedPrefill, divide
from nanoinfer.kernels.attention.prefix_plan import SharedPrefixes
from nanoinfer.kernels.rows import advance_rows, locate_rows
from nanoinfer.runner.message import ChunkMessage, DecodeMessage, JoinMessage, PrefillMessage
from nanoinfer.runner.transfer import upload, upload_all

TABLE_STEP = 16  # a table has a multiple of so many columns: for other strides, Triton would compile anew


class InputBatch:
    """One row for each running sequence, packed from row 0.

    last_tokens: [rows] int32, the token whose keys and values the next decode step computes
    positions: [rows] int32, that token's position in its sequence; -1 in an empty row
    drawn: [rows] int32, the tokens of the last draw; NO_TOKEN where the logits were not finite
    block_tables: [rows, max blocks] int32
    temperatures: [rows] float32; seeds: [rows] int64
    prefixes: those that rows share, if decode attention reads them once
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        prefixes: SharedPrefixes | None = None,
    ) -> None:
        self.block_size = block_size
        self.prefixes = prefixes
        self.device = device
        self.num_rows = 0
        self.last_tokens = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self.positions = torch.full((max_num_seqs,), -1, dtype=torch.int32, device=device)
        self.drawn = torch.zeros_like(self.last_tokens)
        self.block_tables = torch.zeros((max_num_seqs, max_blocks), dtype=torch.int32, device=device)
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

    def _add_blocks(self, new_blocks: list[tuple[int, int, int]]) -> None:
        width = self.block_tables.shape[1]
        flat = array("q")
        for row, column, block in new_blocks:
            flat.extend((row * width + column, block))
        where, blocks = upload(flat, self.device).view(-1, 2).T
        self.block_tables.view(-1).index_copy_(0, where, blocks.int())

    def join(self, prompts: PrefillInputs, token_ids: Tensor) -> None:
        """Append a row for each prompt that a prefill step completes, with the token sampled for it."""
        joining = slice(self.num_rows, self.num_rows + len(token_ids))
        self.num_rows = joining.stop  # first: an interrupt from here on must not leave an uncounted row
        self.last_tokens[joining], self.drawn[joining] = token_ids.clamp(min=0), token_ids
        self.positions[joining] = prompts.sample_positions
        self.block_tables[joining, : prompts.join_tables.shape[1]] = prompts.join_tables
        self.temperatures[joining] = prompts.temperatures
        self.seeds[joining] = prompts.seeds

    def decode_context(self, num_rows: int, kv_cache: Tensor, max_context_len: int, shares: bool) -> Context:
        """Return the context of a decode step over the first `num_rows` rows, computed on the device.

        shares: whether shared prefixes are read once
        """
        positions = self.positions[:num_rows]
        block_tables = self.block_tables[:num_rows]
        slots, context_lens = locate_rows(positions, block_tables, self.block_size)
        prefixes = self.prefixes if shares else None
        return Context(kv_cache, positions, slots, block_tables, context_lens, max_context_len, prefixes=prefixes)

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
    join_tables: [joins, columns] int32; temperatures: [joins] float32; seeds: [joins] int64
    copied_blocks: [2, copies] int64, the blocks to copy, and their copies
    """

    def __init__(self, chunks: list[ChunkMessage], joins: list[JoinMessage], kv_cache: Tensor) -> None:
        width = TABLE_STEP * -(-max(len(chunk.block_table) for chunk in chunks) // TABLE_STEP)
        query_lens = [len(chunk.token_ids) for chunk in chunks]
        arrays = [*_pack_chunks(chunks, kv_cache.shape[3], width), *_pack_joins(joins, width)]
        context_lens = arrays[4].tolist()
        division = divide(query_lens, context_lens)
        if division is not None:
            arrays += [division.rows, division.cu_query_lens, division.context_lens]
        on_device = upload_all(arrays, kv_cache.device)
        self.token_ids, positions, slots, tables, device_context_lens, cu_queries, cu_contexts = on_device[:7]
        sampled, join_tables, copies = on_device[7:10]
        block_tables, divided = tables.view(-1, width), None
        if division is not None:
            rows, *piece_lens = on_device[10:]
            divided = DividedPrefill(division.stretches, division.max_query_len, block_tables[rows], *piece_lens)
        are_long = [chunk.is_long for chunk in chunks]
        packed = PackedQueries(query_lens, context_lens, cu_queries, cu_contexts, are_long, divided)
        self.context = Context(kv_cache, positions, slots, block_tables, device_context_lens, max(context_lens), packed)
        self.last_indices = cu_queries[1:][sampled].long() - 1
        self.sample_positions = device_context_lens[sampled]
        self.join_tables = join_tables.view(-1, width)
        self.copied_blocks = copies.view(-1, 2).T.long()
        self.temperatures = upload(array("f", [join.temperature for join in joins]), kv_cache.device)
        self.seeds = upload(array("q", [join.seed for join in joins]), kv_cache.device)


def _pack_chunks(chunks: list[ChunkMessage], block_size: int, width: int) -> list[array[int]]:
    """Return the chunks' tokens, positions, slots, block tables and context lengths, and the sums of two lengths.

    The sums say where each chunk's queries begin and the last one's end, and the same of contexts laid end to end.
    """
    tokens, positions, slots = array("i"), array("i"), array("i")
    tables, context_lens = array("i"), array("i")
    cu_queries, cu_contexts = array("i", [0]), array("i", [0])
    for chunk in chunks:
        end = chunk.start + len(chunk.token_ids)
        tokens.extend(chunk.token_ids)
        positions.extend(range(chunk.start, end))
        slots.extend(_slots(chunk.block_table, chunk.start, end, block_size))
        tables.extend(_padded(chunk.block_table, width))
        context_lens.append(end)
        cu_queries.append(len(tokens))
        cu_contexts.append(cu_contexts[-1] + end)
    return [tokens, positions, slots, tables, context_lens, cu_queries, cu_contexts]


def _pack_joins(joins: list[JoinMessage], width: int) -> list[array[int]]:
    """Return the numbers of the chunks that the joins end, the joins' block tables, and the blocks to copy."""
    sampled, tables, copies = array("i"), array("i"), array("i")
    for join in joins:
        sampled.append(join.chunk)
        tables.extend(_padded(join.block_table, width))
        copies.extend(join.copied_block or ())
    return [sampled, tables, copies]


def _padded(block_table: list[int], width: int) -> list[int]:
    return block_table + [0] * (width - len(block_table))


def _slots(block_table: list[int], start: int, end: int, block_size: int) -> array[int]:
    """Return the cache slots of tokens `start` to `end`."""
    slots = array("i")
    while start < end:
        block, offset = block_table[start // block_size], start % block_size
        count = min(block_size - offset, end - start)
        slots.extend(range(block * block_size + offset, block * block_size + offset + count))
        start += count
    return slots
