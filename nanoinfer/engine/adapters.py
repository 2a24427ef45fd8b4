"""Adapters: which adapters are loaded, by name."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from nanoinfer.weights.adapters.low_rank import Adapter
from nanoinfer.weights.adapters.source import AdapterSource

NO_SLOTS = (
    "max_adapters=0: this LLM has no room for adapters; make it with max_adapters=1, or with as many as you want to"
    " load at once"
)


class LoadedAdapter(NamedTuple):
    """An adapter that is loaded.

    version: how often its name has been loaded since it was unloaded last
    rank: the largest of its matrices
    modules: the matrices that it changes, as the checkpoint names them
    """

    version: int
    rank: int
    modules: tuple[str, ...]


class Adapters(ABC):
    """The adapters of one engine, or of replicas, which are the same on all.

    loaded: by name
    """

    def __init__(self, most: int) -> None:
        """most: that may be loaded at once, max_adapters"""
        self._most = most
        self.loaded: dict[str, LoadedAdapter] = {}

    @abstractmethod
    def check_fits(self, source: AdapterSource) -> None:
        """Raise ValueError for an adapter that the model does not fit. Nothing changes."""

    @abstractmethod
    def load(self, source: AdapterSource, in_flight: str, begin: Callable[[], None]) -> int:
        """Write an adapter into its slot, in place of one of the same name; returns its version.

        in_flight: as for LLM.update_weights, for its requests alone; begin: does what it says

        Raises ValueError for what the model does not fit, or if there is no room, and as check_slots does.
        """

    @abstractmethod
    def unload(self, name: str) -> None:
        """Give an adapter's slot back. No request of it runs, and the caller has called check_is_loaded."""

    def drop(self) -> None:
        """Forget all adapters, whose memory is lost."""
        self.loaded.clear()

    def check_slots(self) -> None:
        """Raise RuntimeError if there can be no adapters."""
        if not self._most:
            raise RuntimeError(NO_SLOTS)

    def check_is_loaded(self, name: str) -> None:
        """Raise ValueError, with the names most like it, unless an adapter is loaded."""
        if not self._most:
            raise ValueError(f"adapter={name!r}: {NO_SLOTS}")
        if name not in self.loaded:
            like = difflib.get_close_matches(name, self.loaded) or sorted(self.loaded)
            names = f"loaded are {', '.join(map(repr, like))}" if like else "none is; llm.load_adapter loads one"
            raise ValueError(f"adapter={name!r}: is not loaded; {names}")

    def _check_room(self, name: str) -> None:
        """Raise ValueError if there is no room for an adapter, and as check_slots does."""
        self.check_slots()
        if name not in self.loaded and len(self.loaded) == self._most:
            raise ValueError(
                f"adapter={name!r}: max_adapters={self._most}, and so many are loaded:"
                f" {', '.join(map(repr, self.loaded))}; llm.unload_adapter(name) makes room, or load this one by the"
                " name of one of them"
            )

    def _next_version(self, name: str) -> int:
        return self.loaded[name].version + 1 if name in self.loaded else 1

    def describe(self, name: str, adapter: Adapter) -> LoadedAdapter:
        """Return what there is to know of an adapter that is about to be loaded."""
        rank = max(update.rank for update in adapter.values())
        return LoadedAdapter(self._next_version(name), rank, tuple(sorted(adapter)))
