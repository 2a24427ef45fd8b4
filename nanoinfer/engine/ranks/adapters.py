"""RankAdapters: in which slots of the ranks the adapters of one engine lie."""

from __future__ import annotations

from collections.abc import Callable

from nanoinfer.engine.client import Adapters
from nanoinfer.engine.prefixes.prefix_tree import NONE
from nanoinfer.engine.ranks.carrier import AdapterCarrier
from nanoinfer.engine.ranks.ranks import Ranks
from nanoinfer.engine.scheduler import Scheduler
from nanoinfer.process.interrupts import delayed_interrupt
from nanoinfer.process.torch_state import fresh_torch_state
from nanoinfer.weights.adapters.low_rank import Adapter
from nanoinfer.weights.adapters.source import AdapterSource


class RankAdapters(Adapters):
    """The adapters of one engine, which lie in the same slots on all ranks."""

    def __init__(self, ranks: Ranks, scheduler: Scheduler, most: int) -> None:
        """most: slots"""
        super().__init__(most)
        self._ranks, self._scheduler, self._carrier = ranks, scheduler, AdapterCarrier(ranks)
        self._slots: dict[str, int] = {}  # by name; those of names that are not loaded are free

    def slot_of(self, name: str | None) -> int:
        """Return the slot of an adapter that is loaded; NONE: that of no adapter."""
        return NONE if name is None else self._slots[name]

    def load(self, source: AdapterSource, in_flight: str, begin: Callable[[], None]) -> int:
        """Write an adapter into its slot, in place of one of the same name; returns its version."""
        self._ranks.record("load_adapter", source.name, in_flight)
        with self._ranks.consistent():
            self._check_room(source.name)
        return self.write(source.name, self.read(source), begin)

    def check_fits(self, source: AdapterSource) -> None:
        """Raise ValueError for an adapter that the model does not fit. Nothing changes."""
        self.read(source)

    def read(self, source: AdapterSource) -> Adapter:
        """Return what `write` takes. Raises ValueError for an adapter that the model does not fit."""
        with self._ranks.consistent(), fresh_torch_state():
            held = self._ranks.runner.holdings.adapters
            assert held is not None
            return held.reader.read(source)

    def write(self, name: str, adapter: Adapter, begin: Callable[[], None]) -> int:
        """Write an adapter that `read` has checked; returns its version. An error leaves what was there."""
        loaded, slot = self.describe(name, adapter), self._slot_for(name)
        self._ranks.check_consistent("adapter", sorted({update.scale for update in adapter.values()}), loaded)
        with delayed_interrupt():
            begin()
            self._scheduler.reset_prefix_cache(slot)
            self._carrier.write(slot, adapter)
            self._slots[name], self.loaded[name] = slot, loaded
        return loaded.version

    def _slot_for(self, name: str) -> int:
        """Return the slot of an adapter that is about to be loaded: its own, or the first one that is free."""
        if name in self.loaded:
            return self._slots[name]
        return min(set(range(self._most)) - {self._slots[other] for other in self.loaded})

    def unload(self, name: str) -> None:
        """Give an adapter's slot back. Nothing that was computed with it is found any more."""
        self._ranks.record("unload_adapter", name)
        del self.loaded[name]  # if an interrupt comes behind this, the next load into the slot does the rest
        self._scheduler.reset_prefix_cache(self._slots.pop(name))

    def drop(self) -> None:
        """Forget all adapters, whose memory is lost."""
        super().drop()
        self._slots.clear()
