"""The states of layers whose memory of the past has a fixed size: their memory, and copies of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoinfer.attention.cache_layout import CacheLayout, State
from nanoinfer.kernels.states.memory import (
    LayerStates,
    Recurrence,
    TokenRings,
    inputs_length,
    ring_in_order,
    ring_length,
)

BOUNDARY_BYTES = 4  # int32


class StatePool:
    """A number of slots, each with the states of one sequence in all layers.

    Layers whose states are alike have one tensor of each kind, [layers, slots, ...], so that a slot is copied at once.

    layers: see StateContext
    boundaries: [slots] int32, the positions at which the matrices of all layers stand
    ring: how many tokens stand beside matrices in TokenRings; None: no layer has some
    """

    def __init__(self, stacks: dict[tuple[int, ...], LayerStates], boundaries: Tensor) -> None:
        """stacks: for the numbers of layers whose states are alike, the states of all of them"""
        self.layers = {
            layer: own for layers, stack in stacks.items() for layer, own in zip(layers, _by_layer(stack), strict=True)
        }
        self.boundaries = boundaries
        self.ring = next((stack.rings.tokens.shape[2] for stack in stacks.values() if stack.rings is not None), None)
        self._tensors = [boundaries.view(1, -1, 1)]
        for inputs, recurrence, rings in stacks.values():
            self._tensors += [inputs, *(recurrence or ()), *(rings or ())]

    def copy(self, copies: Tensor) -> None:
        """Copy some slots. copies: [2, slots] int64, the slots to copy, and their copies"""
        if copies.numel():
            source, destination = copies
            for numbers in self._tensors:
                numbers[:, destination] = numbers[:, source]

    def parts(self, slot: int) -> list[Tensor]:
        """View what a slot holds, as uint8, [layers, bytes] each; together they have StateSpec.slot_bytes."""
        return [numbers[:, slot].view(len(numbers), -1).view(torch.uint8) for numbers in self._tensors]


def _by_layer(stack: LayerStates) -> Iterator[LayerStates]:
    """Yield each layer's part of a stack."""
    for number, inputs in enumerate(stack.inputs):
        own, rings = stack.recurrence, stack.rings
        yield LayerStates(
            inputs,
            None if own is None else Recurrence(*(numbers[number] for numbers in own)),
            None if rings is None else TokenRings(*(numbers[number] for numbers in rings)),
        )


@dataclass(frozen=True)
class StateSpec:
    """One rank's states, but for the number of slots.

    dtype: of what stands beside matrices, and of the inputs of convolutions; state_dtype: of matrices
    guesses: a step verifies so many of a sequence at most
    in_order: whether sums have one order
    """

    layout: CacheLayout
    dtype: torch.dtype
    state_dtype: torch.dtype
    guesses: int = 0
    in_order: bool = False

    @property
    def slot_bytes(self) -> int:
        """Bytes of a sequence's states; 0: no layer has any."""
        if not self.layout.states:
            return 0
        sizes = self.dtype.itemsize, self.state_dtype.itemsize, self.guesses, self.in_order
        return BOUNDARY_BYTES + sum(state.num_bytes(*sizes) for _, state in self.layout.states)

    def allocate(self, num_slots: int, device: torch.device) -> StatePool:
        """Allocate slots. Raises ValueError when the memory does not hold them."""
        try:
            alike = defaultdict[State, list[int]](list)
            for layer, state in self.layout.states:
                alike[state].append(layer)
            stacks = {
                tuple(layers): self._allocate((len(layers), num_slots), state, device)
                for state, layers in alike.items()
            }
            return StatePool(stacks, torch.zeros(num_slots, dtype=torch.int32, device=device))
        except (MemoryError, torch.OutOfMemoryError, RuntimeError) as error:
            size = num_slots * self.slot_bytes / 2**30
            raise ValueError(
                f"the states of {num_slots} sequences and snapshots take {size:,.1f} GiB, which do not fit the memory:"
                f" lower max_num_seqs or num_kvcache_blocks: {error}"
            ) from error

    def _allocate(self, shape: tuple[int, int], state: State, device: torch.device) -> LayerStates:
        """shape: how many layers and slots"""
        inputs = torch.zeros(
            (*shape, inputs_length(state.width, self.guesses), state.channels), dtype=self.dtype, device=device
        )
        if state.matrices is None:
            return LayerStates(inputs)
        own = state.matrices
        matrices = torch.zeros((*shape, own.heads, own.keys, own.values), dtype=self.state_dtype, device=device)
        if self.in_order:
            ring = (*shape, ring_in_order(self.guesses))
            numbers = state.channels, own.gates * own.heads
            beside = (torch.zeros((*ring, count), dtype=self.dtype, device=device) for count in numbers)
            return LayerStates(inputs, rings=TokenRings(matrices, *beside))
        ring = (*shape, ring_length(self.guesses))
        recurrence = Recurrence(
            matrices,
            torch.zeros((*ring, own.key_heads, own.keys), dtype=self.dtype, device=device),
            torch.zeros((*ring, own.heads, own.values), dtype=self.dtype, device=device),
            torch.zeros((*ring, own.heads), dtype=torch.float32, device=device),
        )
        return LayerStates(inputs, recurrence)
