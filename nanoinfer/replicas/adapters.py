"""ReplicaAdapters: brings each adapter to all replicas, and all of them to a replica that starts again."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from nanoinfer.engine.client import Adapters, LoadedAdapter
from nanoinfer.process.interrupts import delayed_interrupt
from nanoinfer.replicas.weight_transfer import Shape, packed, shared_memory
from nanoinfer.weights.adapters.config import AdapterConfig
from nanoinfer.weights.adapters.source import AdapterSource

if TYPE_CHECKING:
    from nanoinfer.replicas.replicas import Replicas


class ReplicaAdapters(Adapters):
    """The adapters of all replicas. All check an adapter before any of them writes it."""

    def __init__(self, replicas: Replicas, most: int, keeps: bool) -> None:
        """keeps: replicas may start again, so this process keeps a copy of each adapter"""
        super().__init__(most)
        self._replicas = weakref.proxy(replicas)  # which holds this
        self._keeps = keeps
        self._kept: dict[str, tuple[AdapterConfig, list[tuple[Shape, bytes]]]] = {}

    def check_fits(self, source: AdapterSource) -> None:
        """Raise ValueError for an adapter that the model does not fit. Nothing changes."""
        self._replicas.wait_for_one()
        with self._replicas.without_newcomers():
            self._read(source)

    def load(self, source: AdapterSource, in_flight: str, begin: Callable[[], None]) -> int:
        """Write an adapter into all replicas, in place of one of the same name; returns its version.

        begin: called when all have it
        """
        self._check_room(source.name)
        self._replicas.wait_for_one()
        with self._replicas.without_newcomers():
            loaded = self._read(source)._replace(version=self._next_version(source.name))
            kept = {source.name: (source.config, packed(source.tensors))} if self._keeps else {}
            with delayed_interrupt():
                self._replicas.tell_all("write_adapter", source.name, in_flight)
                begin()
                self.loaded[source.name] = loaded
                self._kept.update(kept)
        return loaded.version

    def _read(self, source: AdapterSource) -> LoadedAdapter:
        """Let all replicas check an adapter; returns what one of them says of it."""
        with shared_memory(sum(tensor.nbytes for _, tensor in source.tensors)) as segment:
            answers: list[LoadedAdapter] = self._replicas.send_tensors(
                source.tensors, segment, "read_adapter", source.name, source.config
            )
        if not answers:
            raise RuntimeError(f"adapter={source.name!r}: all replicas died meanwhile, and start again: load it again")
        return answers[0]

    def restore_on(self, index: int) -> None:
        """Let a replica that joins the others load what they have loaded."""
        for name, kept in self._kept.items():
            self._replicas.send(index, "adopt_adapter", name, *kept)

    def unload(self, name: str) -> None:
        """Let all replicas forget an adapter."""
        with delayed_interrupt():
            del self.loaded[name]
            self._kept.pop(name, None)
            self._replicas.tell_all("unload_adapter", name)

    def drop(self) -> None:
        """Forget all adapters, which the replicas have lost."""
        super().drop()
        self._kept.clear()
