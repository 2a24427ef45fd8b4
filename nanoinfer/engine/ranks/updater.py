"""RankUpdater: changes the weights of all ranks, in place, and never lets a mixture of old and new ones compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from torch import Tensor

from nanoinfer.engine.client import InFlightPolicy, Updater
from nanoinfer.engine.ranks.ranks import Ranks
from nanoinfer.engine.scheduler import Scheduler
from nanoinfer.models.description import EMBEDDING, HEAD
from nanoinfer.parallel.buckets import Buckets, room_for
from nanoinfer.process.torch_state import fresh_torch_state
from nanoinfer.weights.roll import constants, listed, met_by, needed
from nanoinfer.weights.shards import Table
from nanoinfer.weights.sources import FileSource, TensorSource


class RankUpdater(Updater):
    """Writes weights from a trainer's tensors or from files.

    missing: the tensors that must come before anything computes: all, from the beginning of an update until it has
        ended well, and when the weights were dropped. Partial updates of incomplete weights need not bring them at once
    """

    def __init__(self, ranks: Ranks, scheduler: Scheduler, is_tied: bool) -> None:
        """is_tied: the model's output projection is its embedding."""
        self._ranks, self._scheduler, self._is_tied = ranks, scheduler, is_tied
        self.missing: frozenset[str] = frozenset()

    @property
    def lacks(self) -> str:
        """Say what is missing; nothing, if the weights are whole."""
        return listed(self.missing)

    def drop(self) -> None:
        """Let all tensors be missing."""
        self.missing = self._needed

    @property
    def _table(self) -> Table:
        with fresh_torch_state():
            return self._ranks.runner.holdings.weights.table

    @cached_property
    def _needed(self) -> frozenset[str]:
        return needed(self._table)

    def update(self, source: TensorSource, in_flight: InFlightPolicy, begin: Callable[[], None]) -> int:
        """Write a trainer's tensors into the weights; returns the version, a new one if no tensor is missing.

        in_flight: as for LLM.update_weights; begin: called before the first write, does what it says
        """
        ranks, table = self._ranks, self._table
        buckets = ranks.make_buckets("holdings.weights.write_bucket")
        before = self.missing if source.is_partial else self.missing & constants(table)
        come: list[str] = []
        room = None
        ranks.check_consistent("update_weights", in_flight, source.is_partial)
        try:
            with ranks.consistent():
                tensors = source.tensors(table)
                if source.holds_tensors:  # then all can be checked before the first is written
                    held = list(tensors)
                    room = sum(room_for(tensor) for _, tensor in held)
                    tensors = iter(held)
                for name, tensor in tensors:
                    ranks.check_open()  # the source runs code that is not ours
                    come.append(name)
                    if len(come) == 1:
                        self._begin(begin, buckets, room, goes_on=0 < len(before) < len(self._needed))
                    self._write(name, tensor, source.holds_tensors, buckets)
                    del tensor  # so that it can go before the next one comes
            ranks.check_open()
            if buckets is not None:
                with ranks.uninterrupted(), fresh_torch_state():
                    buckets.flush()
        finally:
            fault = self._end(buckets) if come else None
        if not come:  # tensors of other models alone
            return self.version
        return self._accept(source.what, fault, before - met_by(table, come))

    def load(self, source: FileSource, in_flight: InFlightPolicy, begin: Callable[[], None]) -> int:
        """Write the tensors of files into the weights; returns the new version. in_flight, begin: as for update"""
        ranks = self._ranks
        with ranks.consistent(), fresh_torch_state():
            source.check(self._table, is_update=True)
            if self._is_tied and source.has_own_head(f"{HEAD}.weight", f"{EMBEDDING}.weight"):
                raise ValueError(
                    f"{source.what}: has an output projection of its own, but this model's is the embedding"
                )
        ranks.check_consistent("load_weights", source.what, in_flight)
        self._begin(begin)
        with ranks.uninterrupted():
            ranks.call("holdings.weights.read", source)
        return self._accept(source.what, self._end())

    def _begin(
        self, begin: Callable[[], None], buckets: Buckets | None = None, room: int | None = None, goes_on: bool = False
    ) -> None:
        """Forget what the old weights have computed. From here on the weights are a mixture.

        room: as for Buckets.open; goes_on: tensors of earlier calls count
        """
        begin()
        self._scheduler.reset_prefix_cache()
        with self._ranks.uninterrupted():
            if buckets is not None:
                with fresh_torch_state():
                    buckets.open(room)
            self._ranks.call("holdings.begin_weights", goes_on)
        self.missing = self._needed

    def _write(self, name: str, tensor: Tensor, stays: bool, buckets: Buckets | None) -> None:
        writer = self._ranks.runner.holdings.weights
        self._ranks.record("tensor", name)
        with fresh_torch_state():
            writer.write(name, tensor, stays)
            if buckets is not None:
                with self._ranks.uninterrupted():
                    buckets.put(name, tensor, is_stack=writer.table[name][0].entry is not None)

    def _end(self, buckets: Buckets | None = None) -> str | None:
        """Wait until every rank has written what it got; returns what is wrong with the numbers, if anything is."""
        try:
            if self._ranks.is_closed:
                return None
            self._ranks.check_consistent("end of weights")
            with self._ranks.uninterrupted():
                fault: str | None = self._ranks.call("holdings.weights.end")
                return fault
        finally:
            if buckets is not None:
                buckets.close()

    def _accept(self, what: str, fault: str | None, missing: frozenset[str] = frozenset()) -> int:
        """Count new weights, if nothing is wrong with them and none are missing; returns the version."""
        if fault is not None:
            raise ValueError(f"{what}: {fault}")
        if missing:
            self.missing = missing
            return self.version
        version = self.version + 1
        for seq in self._scheduler.unfinished:
            seq.use_weights(version)
        self.version = version
        self.missing = missing
        return version
