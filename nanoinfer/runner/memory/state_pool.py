"""The states of layers whose memory of the past has a fixed size: their memory, and copies of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanoinfer.attention.cache_layout import CacheLayout, State
from nanoinfer.kernels.states.memory import LayerStates, Recurrence, inputs_length, ring_length

BOUNDARY_BYTES = 4  # int32


class StatePool:
    """A number of slots, each with the states of one sequence in all layers.

    layers: see StateContext
    boundaries: [slots] int32, the positions at which the matrices of all layers stand
    """

    def __init__(self, layers: dict[int, LayerStates], boundaries: Tensor) -> None:
        self.layers, self.boundaries = layers, boundaries

    @property
    def _tensors(self) -> list[Tensor]:
        tensors = [self.boundaries]
        for inputs, recurrence in self.layers.values():
            tensors += [inputs, *(recurrence or ())]
        return tensors

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

    dtype: of what stands beside matrices, and of the inputs of convolutions; state_dtype: of matrices
    guesses: a step verifies so many of a sequence at most
    """

    layout: CacheLayout
    dtype: torch.dtype
    state_dtype: torch.dtype
    guesses: int = 0

    @property
    def slot_bytes(self) -> int:
        """Bytes of a sequence's states; 0: no layer has any."""
        if not self.layout.states:
            return 0
        sizes = self.dtype.itemsize, self.state_dtype.itemsize, self.guesses
        return BOUNDARY_BYTES + sum(state.num_bytes(*sizes) for _, state in self.layout.states)

    def allocate(self, num_slots: int, device: torch.device) -> StatePool:
        """Allocate slots. Raises ValueError when the memory does not hold them."""
        try:
            layers = {layer: self._allocate_layer(state, num_slots, device) for layer, state in self.layout.states}
            return StatePool(layers, torch.zeros(num_slots, dtype=torch.int32, device=device))
        except (MemoryError, torch.OutOfMemoryError, RuntimeError) as error:
            size = num_slots * self.slot_bytes / 2**30
            raise ValueError(
                f"the states of {num_slots} sequences and snapshots take {size:,.1f} GiB, which do not fit the memory:"
                f" lower max_num_seqs or num_kvcache_blocks: {error}"
            ) from error

    def _allocate_layer(self, state: State, slots: int, device: torch.device) -> LayerStates:
        inputs = torch.zeros(
            (slots, inputs_length(state.width, self.guesses), state.channels), dtype=self.dtype, device=device
        )
        if state.matrices is None:
            return LayerStates(inputs)
        own, ring = state.matrices, (slots, ring_length(self.guesses))
        recurrence = Recurrence(
            torch.zeros((slots, own.heads, own.keys, own.values), dtype=self.state_dtype, device=device),
            torch.zeros((*ring, own.key_heads, own.keys), dtype=self.dtype, device=device),
            torch.zeros((*ring, own.heads, own.values), dtype=self.dtype, device=device),
            torch.zeros((*ring, own.heads), dtype=torch.float32, device=device),
        )
        return LayerStates(inputs, recurrence)
