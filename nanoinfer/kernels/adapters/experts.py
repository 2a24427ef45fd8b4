"""Adapters of experts: what a token's adapter adds to the two products of each expert that the token chooses.

A choice takes the matrices of an expert and of a slot. The choices are sorted by both, the expert first. So the sorted
choices serve the experts' own products as well, which multiply tiles of one expert, and add what is added to a choice.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nanoinfer.kernels.adapters.pairs import AdapterRows, Pairs, SortedRows
from nanoinfer.kernels.adapters.products import expand_triton, shrink_triton
from nanoinfer.kernels.sorting import group_triton


@dataclass(frozen=True)
class ExpertAdapters:
    """The adapters of a layer's experts, and which of them each token names.

    gate_up, down: the pairs of the two products; a of [experts * slots, parts * rank, in_features] and b likewise have
        one expert's slots after the other's
    rows: the tokens
    """

    gate_up: Pairs
    down: Pairs
    rows: AdapterRows

    def of_expert(self, pairs: Pairs, number: int, tokens: Tensor) -> tuple[Pairs, AdapterRows]:
        """Return those of one expert, and the rows of the tokens that choose it. pairs: gate_up or down"""
        slots = self.rows.max_adapters
        own = slice(number * slots, (number + 1) * slots)
        return Pairs(pairs.a[own], pairs.b[own], pairs.parts), AdapterRows.of(self.rows.slots[tokens], slots)

    def sort(self, experts: Tensor) -> ChoiceAdapters:
        """Sort the tokens' choices, [tokens, used] int32, in four launches; at least one comes before the products."""
        slots = self.rows.max_adapters
        count = len(self.down.a) // slots
        chosen = (self.rows.slots % (slots + 1)).unsqueeze(1).add(experts, alpha=slots + 1)
        size = 16 if experts.numel() <= 64 * count else 64
        return ChoiceAdapters(self, SortedRows(slots, group_triton(chosen, count * (slots + 1), size), size))


@dataclass(frozen=True)
class ChoiceAdapters:
    """The adapters of the tokens' choices, which are sorted by expert and slot. Each method makes two launches."""

    adapters: ExpertAdapters
    rows: SortedRows

    def beside_gate_up(self, x: Tensor) -> Tensor:
        """Return what is added to each choice's gates and ups, [choices, 2 * size]; x: [tokens, hidden_size]"""
        used = len(self.rows.groups.choices) // len(x)
        h = shrink_triton(x, self.adapters.gate_up, self.rows, used=used)
        return expand_triton(h, self.adapters.gate_up, self.rows)

    def beside_down(self, gated: Tensor) -> Tensor:
        """Return what is added to each choice's downs, [choices, outputs]; gated: their inputs, sorted as `rows`."""
        h = shrink_triton(gated, self.adapters.down, self.rows, used=0)
        return expand_triton(h, self.adapters.down, self.rows)
