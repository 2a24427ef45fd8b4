"""InputBatch: the rows of the running batch, kept on the device so that a decode step needs nothing from the host."""

from __future__ import annotations

from array import array
from itertools import accumulate

import torch
from torch import Tensor

from nanoinfer.attention.context import Context, GroupContext, StateContext
from nanoinfer.kernels.attention.prefixes.prefix_plan import SharedPrefixes
from nanoinfer.kernels.delta.chunks import CHUNK
from nanoinfer.kernels.drafting.gather import RowColumns, gather_rows
from nanoinfer.kernels.drafting.pack import GuessedRows
from nanoinfer.kernels.rows import advance_rows, locate_rows
from nanoinfer.kernels.states.boundaries import begin_rows
from nanoinfer.kernels.states.in_order import spans_of_rows
from nanoinfer.kernels.states.memory import StateRows
from nanoinfer.runner.memory.kv_cache import KVCache
from nanoinfer.runner.memory.state_pool import StatePool
from nanoinfer.runner.message import DecodeMessage, PrefillMessage
from nanoinfer.runner.steps.prefill_inputs import PrefillInputs
from nanoinfer.runner.steps.row_table import RowTable
from nanoinfer.runner.transfer import upload


class InputBatch:
    """One row for each running sequence, in the columns of `table`.

    last_tokens: [rows] int32, the token whose keys and values the next decode step computes
    positions: [rows] int32, that token's position in its sequence; -1 in an empty row
    drawn: [rows] int32, the tokens of the last draw; NO_TOKEN where the logits were not finite
    block_tables: [rows, columns] int32, in pages; one group's after another's, as `tables` divides them
    slots: [rows] int32, for states; -1 in an empty row; None: no layer has states
    deltas: [rows] int32, rotary positions less places; None: they are equal
    adapters: [rows] int32, the slots of their adapters, -1 for none and in an empty row; None: no row may have one
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
        has_deltas: bool = False,
        may_adapt: bool = False,
        in_sections: bool = False,
    ) -> None:
        """max_blocks: of a row, for each group of layers; has_deltas: rotary positions may be others than places.

        may_adapt: rows may have adapters; in_sections: as for PrefillInputs
        """
        self._in_sections = in_sections
        self.block_sizes, self.steps = [group.block_size for group in kv_cache.layout.groups], kv_cache.steps
        self.prefixes = prefixes
        self.device = device
        table = self.table = RowTable(max_num_seqs, device)
        self.last_tokens = table.column(torch.int32)
        self.positions = table.column(torch.int32, empty=-1)
        self.drawn = torch.zeros_like(self.last_tokens)
        self.block_tables = table.column(torch.int32, sum(max_blocks))
        self.tables = self.block_tables.split(max_blocks, dim=1)
        self._widths, self._first_columns = max_blocks, [0, *accumulate(max_blocks)]
        self.slots = table.column(torch.int32, empty=-1) if kv_cache.layout.states else None
        self.deltas = table.column(torch.int32) if has_deltas else None
        self.adapters = table.column(torch.int32, empty=-1) if may_adapt else None
        self.temperatures = table.column(torch.float32)
        self.seeds = table.column(torch.int64)

    def update(self, message: PrefillMessage | DecodeMessage) -> None:
        """Move rows and add blocks, as the message says, before its step runs."""
        self.table.update(message)
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

    def join(self, prompts: PrefillInputs) -> slice:
        """Append a row for each prompt that a prefill step completes; returns these rows. Their next tokens come."""
        first = self.table.num_rows
        joining = slice(first, first + len(prompts.last_indices))
        self.table.num_rows = joining.stop  # first: an interrupt from here on must not leave an uncounted row
        self.positions[joining] = prompts.last_positions
        for table, joined in zip(self.tables, prompts.join_tables, strict=True):
            table[joining, : joined.shape[1]] = joined
        if self.slots is not None:
            self.slots[joining] = prompts.slots
        if self.deltas is not None:
            self.deltas[joining] = 0 if prompts.deltas is None else prompts.deltas
        if self.adapters is not None:
            self.adapters[joining] = -1 if prompts.adapters is None else prompts.adapters[prompts.last_indices]
        self.temperatures[joining] = prompts.temperatures
        self.seeds[joining] = prompts.seeds
        return joining

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

    def context(self, positions: Tensor, own: RowColumns, kv_cache: KVCache, max_context_len: int) -> Context:
        """Return the context of a step over one token each of rows, or of places: to the layers, these are rows, too.

        But for states, of which see state_context.

        positions: [n] int32, of the tokens; own: what they have of their rows
        """
        groups = []
        for table, block_size in zip(self.divide(own.block_tables), self.block_sizes, strict=True):
            slots, context_lens, rotary = locate_rows(positions, table, block_size, own.deltas)
            groups.append(GroupContext(slots, table))
        if self._in_sections:
            rotary = rotary.repeat(3, 1)
        return Context(kv_cache.layers, groups, positions, context_lens, max_context_len, rotary=rotary)

    def state_context(self, positions: Tensor, states: StatePool, guessed: GuessedRows | None) -> StateContext:
        """Begin a step with its rows' states; positions: [n] int32, of the tokens; guessed: of a verifying step"""
        assert self.slots is not None
        slots = self.slots[: len(positions)] if guessed is None else self.slots[guessed.rows]
        since = CHUNK if states.ring is None else CHUNK - 1
        own, boundaries = begin_rows(slots, positions[: len(slots)], states.boundaries, since)
        guesses = () if guessed is None else (guessed.first, guessed.counts, guessed.most)
        rows = StateRows(own, positions, boundaries, *guesses)
        spans = None if states.ring is None else spans_of_rows(rows, states.ring)
        return StateContext(states.layers, rows, spans=spans)

    def advance(self, rows: slice, token_ids: Tensor) -> None:
        """Give rows their sampled tokens, and move each a position on; empty rows stay empty."""
        advance_rows(self.last_tokens[rows], self.positions[rows], token_ids, self.drawn[rows])
