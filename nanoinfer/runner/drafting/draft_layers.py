"""DraftLayers: where a draft's own layers keep the keys of the rows for which it guesses."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from nanoinfer.attention.context import Context, GroupContext
from nanoinfer.config import Config
from nanoinfer.kernels.drafting.gather import RowColumns
from nanoinfer.kernels.rows import locate_rows
from nanoinfer.runner.drafting.texts import DraftingRows
from nanoinfer.runner.memory.holdings import Holdings
from nanoinfer.runner.steps.input_batch import InputBatch


class DraftLayers:
    """The layers of the KV cache that are a draft's. They lie in the model's blocks, or in a group of their own."""

    def __init__(self, config: Config, batch: InputBatch, rows: DraftingRows, holdings: Holdings) -> None:
        assert config.draft is not None
        self._batch, self._rows, self._holdings = batch, rows, holdings
        self._first, self._longest, self._most = config.draft.layers.start, config.max_model_len, config.max_guesses
        groups = config.cache_layout.groups
        self._groups = [
            next(number for number, group in enumerate(groups) if group.pages == own.pages)
            for own in config.cache_layout.part(config.draft.layers).groups
        ]
        self.skips_empty = config.is_plain_cpu  # elsewhere, graphs need fixed sizes

    def beside(self, context: Context) -> Context:
        """Return the context of a prefill step of the model's as these layers see it."""
        groups = [replace(context.groups[number], plan=None) for number in self._groups]  # the model's has its layers
        # Steering is of the model, and so are embeddings in place of tokens: a draft's have another size or space.
        return replace(context, layers=self._layers, groups=groups, steering=None, media=None)

    def at(self, positions: Tensor, own: RowColumns) -> Context:
        """Return the context of a token each of rows, or of places. positions, own: as for InputBatch.context"""
        tables, groups = self._batch.divide(own.block_tables), []
        for number in self._groups:
            slots, context_lens, _ = locate_rows(positions, tables[number], self._batch.block_sizes[number])
            groups.append(GroupContext(slots, tables[number]))
        return Context(self._layers, groups, positions, context_lens, self._longest)

    def depth(self, num_rows: int, guesses: int) -> int:
        """Return how many guesses each of so many rows gets in a step that has places for so many of all."""
        depth = min(self._most, -(-guesses // num_rows))
        if self.skips_empty:  # then a step has no more guesses than limits allow
            depth = min(depth, max(1, int(self._rows.limits[:num_rows].max())))
        return depth

    @property
    def _layers(self) -> dict[int, tuple[Tensor, Tensor]]:
        """These layers of the KV cache that there is now, by the draft's own numbers."""
        layers, first = self._holdings.kv_cache.layers, self._first
        return {layer - first: pages for layer, pages in layers.items() if layer >= first}
