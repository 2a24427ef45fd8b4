"""ReplicaUpdater: changes the weights of all replicas, and never lets two of them compute with different ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from nanoinfer.engine.client import InFlightPolicy, Updater
from nanoinfer.engine.ranks.workers import WorkerError
from nanoinfer.replicas.weight_transfer import Shape, shared_memory
from nanoinfer.weights.sources import FileSource, TensorSource

if TYPE_CHECKING:
    from nanoinfer.replicas.replicas import Replicas

ALL = "all tensors"  # are missing


class ReplicaUpdater(Updater):
    """Changes the weights of all replicas."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = weakref.proxy(replicas)  # which holds this
        self._lacks = ""  # whatever single replicas have

    @property
    def lacks(self) -> str:
        """Say which tensors are missing."""
        return self._lacks

    def drop(self) -> None:
        """Let all tensors be missing."""
        self._lacks = ALL

    def update(self, source: TensorSource, in_flight: InFlightPolicy, begin: Callable[[], None]) -> int:
        """Write a trainer's tensors into all replicas; returns the version, a new one if no tensor is missing.

        begin: called when all have them
        """
        replicas, anew, num_bytes = self._replicas, self._lacks == ALL, None
        tensors = source.pairs()
        if source.holds_tensors:  # then all can be checked before the first is written
            held = list(tensors)
            if source.is_partial and not held:  # tensors of other models alone
                return self.version
            shapes = [Shape(name, tuple(tensor.shape), tensor.dtype) for name, tensor in held]
            replicas.call("check_weights", shapes, source.is_partial)
            num_bytes = sum(tensor.nbytes for _, tensor in held)
            tensors = iter(held)
        with self._new_version() as version, shared_memory(num_bytes) as segment:
            states: list[tuple[int, str]] = replicas.send_tensors(
                tensors, segment, "update_weights", source.is_partial, in_flight, version, anew
            )
            begin()
            self.version, self._lacks = min(states)
        return self.version

    def load(self, source: FileSource, in_flight: InFlightPolicy, begin: Callable[[], None]) -> int:
        """Write the tensors of files into all replicas; returns the new version. begin: called when all have them."""
        with self._new_version() as version:
            self._replicas.call("load_weights", source, in_flight, version)
            begin()
            self.version, self._lacks = version, ""
        return self.version

    @contextmanager
    def _new_version(self) -> Iterator[int]:
        """Return a context in which all replicas get the weights of a version, or are asked what they have got.

        Behind it, tensors that have come to some replicas before it broke off count for none.
        """
        self._replicas.end_starting()
        version, before, self._lacks = self.version + 1, self._lacks, ALL
        try:
            yield version
        except Exception:
            with suppress(ValueError, WorkerError):  # the LLM is closed
                if not (before or any(self._replicas.call("has_mixed_weights", version))):
                    self._lacks = ""
            raise
