"""Transfers: what a step's message says of copies between the device and host memory."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Transfers:
    """Copies between the device and host memory, beside a step. Each slot holds a block's content, or a part of states.

    saved: (block, slot); the step does not write what they hold
    restored: (slot, block); only a prefill step may read them
    saved_states: (the slot of states, those of host memory that get them); the step does not write them
    restored_states: likewise (those of host memory, the slot of states)
    first: what is saved before the step runs, and before all else here
    """

    saved: list[tuple[int, int]] = field(default_factory=list)
    restored: list[tuple[int, int]] = field(default_factory=list)
    saved_states: list[tuple[int, list[int]]] = field(default_factory=list)
    restored_states: list[tuple[list[int], int]] = field(default_factory=list)
    first: Transfers | None = None

    @property
    def num_saved(self) -> int:
        """How many slots of host memory get new content."""
        before = 0 if self.first is None else self.first.num_saved
        return before + len(self.saved) + sum(len(slots) for _, slots in self.saved_states)

    @property
    def num_restored(self) -> int:
        """How many slots' content goes back to the device."""
        return len(self.restored) + sum(len(slots) for slots, _ in self.restored_states)
