"""The states of layers whose memory of the past has a fixed size: their memory, and copies of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanoinfer.attention.cache_layout import CacheLayout


class StatePool:
    """A number of slots, each with the states of one sequence in all layers. layers: see StateContext."""

    def __init__(self, layers: dict[int, tuple[Tensor, Tensor | None]]) -> None:
        self.layers = layers

    @property
    def _tensors(self) -> list[Tensor]:
        return [numbers for states in self.layers.values() for numbers in states if numbers is not None]

    def copy(self, copies: Tensor) -> None:
        """Copy some slots. copies: [2, slots] int64, the slots to copy, and their copies"""
        if copies.numel():
            source, destination = copies
            for numbers in self._tensors:
                numbers[destination] = numbers[source]

    def parts(self, slot: int) -> list[Tensor]:
        """View what a slot holds, as uint8 vectors; together they have StateSpec.slot_bytes."""
        return [numbers[slot].view(-1).view(torch.uint8) for numbers in self._tensors]


@dataclass(frozen=True)
class StateSpec:
    """One rank's states, but for the number of slots.

    dtype: of the inputs of convolutions; state_dtype: of the matrices of recurrences
    """

    layout: CacheLayout
    dtype: torch.dtype
    state_dtype: torch.dtype

    @property
    def slot_bytes(self) -> int:
        """Bytes of a sequence's states; 0: no layer has any."""
        sizes = self.dtype.itemsize, self.state_dtype.itemsize
        return sum(state.num_bytes(*sizes) for _, state in self.layout.states)

    def allocate(self, num_slots: int, device: torch.device) -> StatePool:
        """Allocate slots. Raises ValueError when the memory does not hold them."""
        layers: dict[int, tuple[Tensor, Tensor | None]] = {}
        try:
            for layer, state in self.layout.states:
                inputs = torch.zeros((num_slots, state.width, state.channels), dtype=self.dtype, device=device)
                matrices = None
                if state.matrices is not None:
                    matrices = torch.zeros((num_slots, *state.matrices), dtype=self.state_dtype, device=device)
                layers[layer] = inputs, matrices
        except (MemoryError, torch.OutOfMemoryError, RuntimeError) as error:
            size = num_slots * self.slot_bytes / 2**30
            raise ValueError(
                f"the states of {num_slots} sequences and snapshots take {size:,.1f} GiB, which do not fit the memory:"
                f" lower max_num_seqs or num_kvcache_blocks: {error}"
            ) from error
        return StatePool(layers)
