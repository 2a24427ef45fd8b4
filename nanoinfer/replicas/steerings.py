"""ReplicaSteerings: brings vectors to all replicas, and all of them to a replica that starts again."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from nanoinfer.engine.ranks.steerings import Steerings
from nanoinfer.process.interrupts import delayed_interrupt
from nanoinfer.runner.steering import Vectors

if TYPE_CHECKING:
    from nanoinfer.replicas.replicas import Replicas


class ReplicaSteerings(Steerings):
    """Those of all replicas, of which this process keeps a copy."""

    def __init__(self, replicas: Replicas, most: int) -> None:
        super().__init__(most)
        self._replicas = weakref.proxy(replicas)  # which holds this
        self._kept: dict[str, Vectors] = {}

    def load(self, name: str, vectors: Vectors) -> None:
        """Let all replicas write vectors."""
        self._replicas.wait_for_one()
        with self._replicas.without_newcomers(), delayed_interrupt():
            self._replicas.tell_all("load_steering", name, dict(vectors))
            self.loaded[name], self._kept[name] = tuple(sorted(vectors)), vectors

    def restore_on(self, index: int) -> None:
        """Let a replica that joins the others load what they have loaded."""
        for name, vectors in self._kept.items():
            self._replicas.send(index, "load_steering", name, dict(vectors))

    def unload(self, name: str) -> None:
        """Let all replicas forget vectors."""
        with delayed_interrupt():
            del self.loaded[name], self._kept[name]
            self._replicas.tell_all("unload_steering", name)

    def drop(self) -> None:
        """Forget all, which the replicas have lost."""
        super().drop()
        self._kept.clear()
