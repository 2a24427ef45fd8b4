"""InputBatch: the rows of the running batch, kept on the device so that a decode step needs nothing from the host."""

from __future__ import annotations

from array import array
from itertools import accumulate

import torch
from torch import Tensor

from nanoinfer.attention.context import Context, GroupContext, StateContext
from nanoinfer.kernels.attention.prefix_plan import SharedPrefixes
from nanoinfer.kernels.drafting.gather import RowColumns, gather_rows
from nanoinfer.kernels.drafting.pack import Places
from nanoinfer.kernels.rows import advance_rows, locate_rows
from nanoinfer.runner.drafting.texts import DraftingRows
from nanoinfer.runner.memory.kv_cache import KVCache
from nanoinfer.runner.memory.state_pool import StatePool
from nanoinfer.runner.message import DecodeMessage, PrefillMessage
from nanoinfer.runner.steps.prefill_inputs import PrefillInputs
from nanoinfer.runner.transfer import upload


class InputBatch:
    """One row for each running sequence, packed from row 0.

    last_tokens: [rows] int32, the token whose keys and values the next decode step computes
    positions: [rows] int32, that token's position in its sequence; -1 in an empty row
    drawn: [rows] int32, the tokens of the last draw; NO_TOKEN where the logits were not finite
    block_tables: [rows, columns] int32, in pages; one group's after another's, as `tables` divides them
    slots: [rows] int32, for states; -1 in an empty row
    deltas: [rows] int32, rotary positions less places; None: they are equal
    adapters: [rows] int32, the slots of their adapters, -1 for none and in an empty row; None: no row may have one
    temperatures: [rows] float32; seeds: [rows] int64
    drafting: further columns, if guesses are verified
    prefixes: those that rows share, if decode attention reads them once
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_blocks: list[int],
        kv_cache: KVCache,
        device: torch.device,
        prefixes: SharedPrefixes | None = None,
        has_deltas: bool = False,
        may_adapt: bool = False,
        drafting: DraftingRows | None = None,
    ) -> None:
        """max_blocks: of a row, for each group of layers; has_deltas: rotary positions may be others than places.

        may_adapt: rows may have adapters; drafting: given if guesses are verified
        """
        self.block_sizes, self.steps = [group.block_size for group in kv_cache.layout.groups], kv_cache.steps
        self.prefixes, self.drafting = prefixes, drafting
        self.device = device
        self.num_rows = 0
        self.last_tokens = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self.positions = torch.full((max_num_seqs,), -1, dtype=torch.int32, device=device)
        self.drawn = torch.zeros_like(self.last_tokens)
        self.block_tables = torch.zeros((max_num_seqs, sum(max_blocks)), dtype=torch.int32, device=device)
        self.tables = self.block_tables.split(max_blocks, dim=1)
        self._widths, self._first_columns = max_blocks, [0, *accumulate(max_blocks)]
        self.slots = torch.full_like(self.positions, -1)
        self.deltas = torch.zeros_like(self.positions) if has_deltas else None
        self.adapters = torch.full_like(self.positions, -1) if may_adapt else None
        self._has_states = bool(kv_cache.layout.states)
        self.temperatures = torch.zeros(max_num_seqs, dtype=torch.float32, device=device)
        self.seeds = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)

    def update(self, message: PrefillMessage | DecodeMessage) -> None:
        """Move rows and add blocks, as the message says, before its step runs."""
        if message.moves:
            flat = array("i", [row for move in message.moves for row in move])
            source, destination = upload(flat, self.device).view(-1, 2).T
            for rows in (self.last_tokens, self.positions, self.block_tables, self.temperatures, self.seeds):
                rows[destination] = rows[source]
            if self._has_states:
                self.slots[destination] = self.slots[source]
            if self.deltas is not None:
                self.deltas[destination] = self.deltas[source]
            if self.adapters is not None:
                self.adapters[destination] = self.adapters[source]
            if self.drafting is not None:
                self.drafting.move(source, destination)
        if message.num_rows < self.num_rows:
            self.positions[message.num_rows : self.num_rows] = -1
            if self._has_states:
                self.slots[message.num_rows : self.num_rows] = -1
            if self.adapters is not None:
                self.adapters[message.num_rows : self.num_rows] = -1
            if self.drafting is not None:
                self.drafting.empty(message.num_rows, self.num_rows)
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
        if self._has_states:
            self.slots[joining] = prompts.slots
        if self.deltas is not None:
            self.deltas[joining] = 0 if prompts.deltas is None else prompts.deltas
        if self.adapters is not None:
            self.adapters[joining] = -1 if prompts.adapters is None else prompts.adapters[prompts.last_indices]
        self.temperatures[joining] = prompts.temperatures
        self.seeds[joining] = prompts.seeds

    def decode_context(
        self, num_rows: int, kv_cache: KVCache, states: StatePool | None, max_context_len: int, shares: bool
    ) -> Context:
        """Return the context of a decode step over the first `num_rows` rows, computed on the device.

        states: given if layers have some; shares: whether shared prefixes are read once
        """
        deltas = None if self.deltas is None else self.deltas[:num_rows]
        tables = [table[:num_rows] for table in self.tables]
        context = self._context(self.positions[:num_rows], tables, deltas, kv_cache, max_context_len)
        context.prefixes = self.prefixes if shares else None
        if states is not None:
            context.states = StateContext(states.layers, self.slots[:num_rows])
        return context

    def gather(self, row_of: Tensor) -> RowColumns:
        """Return what each place of a verifying step has of its row; row_of: [places] int32."""
        return gather_rows(self.columns, row_of)

    @property
    def columns(self) -> RowColumns:
        """What all rows have, as `gather` returns it of some."""
        return RowColumns(self.block_tables, self.temperatures, self.seeds, self.deltas, self.adapters)

    def divide(self, block_tables: Tensor) -> list[Tensor]:
        """Return the block tables of each group of layers; block_tables: [n, columns], from RowColumns"""
        return list(block_tables.split(self._widths, dim=1))

    def verify_context(self, places: Places, own: RowColumns, kv_cache: KVCache, max_context_len: int) -> Context:
        """Return the context of a verifying step: to the layers, each place is a row that decodes one token.

        own: from `gather`
        """
        tables = self.divide(own.block_tables)
        return self._context(places.positions, tables, own.deltas, kv_cache, max_context_len)

    def _context(
        self, positions: Tensor, tables: list[Tensor], deltas: Tensor | None, kv_cache: KVCache, max_context_len: int
    ) -> Context:
        """Locate one token of each row; tables, deltas: those of its rows."""
        groups = []
        for table, block_size in zip(tables, self.block_sizes, strict=True):
            slots, context_lens, rotary = locate_rows(positions, table, block_size, deltas)
            groups.append(GroupContext(slots, table))
        return Context(kv_cache.layers, groups, positions, context_lens, max_context_len, rotary=rotary)

    def advance(self, token_ids: Tensor) -> None:
        """Give the first rows their sampled tokens; empty rows stay empty."""
        num_rows = len(token_ids)
        advance_rows(self.last_tokens[:num_rows], self.positions[:num_rows], token_ids, self.drawn[:num_rows])
