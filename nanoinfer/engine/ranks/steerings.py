"""Steerings: the named vectors of one engine, or of replicas, which are the same on all."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod

from nanoinfer.engine.ranks.ranks import Ranks
from nanoinfer.process.interrupts import delayed_interrupt
from nanoinfer.runner.message import Steered
from nanoinfer.runner.steering import Vectors

NO_SLOTS = (
    "max_steerings=0: this LLM has no room for steerings; make it with max_steerings=1, or with as many as you want to"
    " load at once"
)


class Steerings(ABC):
    """Those that are loaded, and who has them.

    loaded: by name, the numbers of the hidden states that each adds to
    """

    def __init__(self, most: int) -> None:
        """most: that may be loaded at once, max_steerings"""
        self._most = most
        self.loaded: dict[str, tuple[int, ...]] = {}

    @abstractmethod
    def load(self, name: str, vectors: Vectors) -> None:
        """Write vectors that fit the model, in place of those of the same name; the caller has called check_room."""

    @abstractmethod
    def unload(self, name: str) -> None:
        """Forget vectors. No request of them runs, and the caller has called check_is_loaded."""

    def drop(self) -> None:
        """Forget all, whose memory is lost."""
        self.loaded.clear()

    def check_room(self, name: str) -> None:
        """Raise RuntimeError if there can be none, and ValueError if there is no room for one more."""
        if not self._most:
            raise RuntimeError(NO_SLOTS)
        if name not in self.loaded and len(self.loaded) == self._most:
            raise ValueError(
                f"steering={name!r}: max_steerings={self._most}, and so many are loaded:"
                f" {', '.join(map(repr, self.loaded))}; llm.unload_steering(name) makes room"
            )

    def check_is_loaded(self, name: str) -> None:
        """Raise ValueError, with the names most like it, unless vectors of this name are loaded."""
        if not self._most:
            raise ValueError(f"steering={name!r}: {NO_SLOTS}")
        if name not in self.loaded:
            like = difflib.get_close_matches(name, self.loaded) or sorted(self.loaded)
            names = f"loaded are {', '.join(map(repr, like))}" if like else "none is; llm.load_steering loads one"
            raise ValueError(f"steering={name!r}: is not loaded; {names}")


class RankSteerings(Steerings):
    """Those of one engine, in the same slots on all ranks."""

    def __init__(self, ranks: Ranks, most: int) -> None:
        """most: slots"""
        super().__init__(most)
        self._ranks = ranks
        self._slots: dict[str, tuple[int, int]] = {}  # by name: the slot, and the number of what was loaded into it
        self._num_loaded = 0

    def named(self, steering: tuple[str, float] | None) -> Steered | None:
        """Return what the ranks and the prefix cache know of a request's steering."""
        return None if steering is None else Steered(*self._slots[steering[0]], steering[1])

    def load(self, name: str, vectors: Vectors) -> None:
        """Write vectors into a slot. What was computed with those before is of another number, and never found."""
        self._ranks.check_consistent("load_steering", name, [(layer, vectors[layer].tobytes()) for layer in vectors])
        taken = {slot for slot, _ in self._slots.values()}
        slot = self._slots[name][0] if name in self._slots else min(set(range(self._most)) - taken)
        with delayed_interrupt():
            self._ranks.call("holdings.steering.write", slot, dict(vectors))
            self._num_loaded += 1
            self._slots[name], self.loaded[name] = (slot, self._num_loaded), tuple(sorted(vectors))

    def unload(self, name: str) -> None:
        """Give a slot back."""
        self._ranks.record("unload_steering", name)
        del self.loaded[name], self._slots[name]

    def drop(self) -> None:
        """Forget all, whose memory is lost."""
        super().drop()
        self._slots.clear()
