"""EngineClient: what an LLM asks of an engine in its process, or of replicas in others."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple

from nanoinfer.engine.ranks.steerings import Steerings
from nanoinfer.engine.results.stats import Counters
from nanoinfer.engine.results.step_result import StepResult
from nanoinfer.runner.memory.lender import Tag
from nanoinfer.runner.memory.plan import MemoryPlan
from nanoinfer.weights.adapters.low_rank import Adapter
from nanoinfer.weights.adapters.source import AdapterSource
from nanoinfer.weights.sources import FileSource, TensorSource

NO_SLOTS = (
    "max_adapters=0: this LLM has no room for adapters; make it with max_adapters=1, or with as many as you want to"
    " load at once"
)

InFlightPolicy = Literal["recompute", "keep", "abort"]  # of the requests that run when the weights change


class Updater(ABC):
    """Changes the weights.

    version: the updates that have ended well
    """

    version = 0

    @property
    @abstractmethod
    def lacks(self) -> str:
        """Say which tensors are missing; nothing, if the weights are whole."""

    @abstractmethod
    def drop(self) -> None:
        """Let all tensors be missing."""

    @abstractmethod
    def update(self, source: TensorSource, in_flight: InFlightPolicy, begin: Callable[[], None]) -> int:
        """Write a trainer's tensors; returns the version, a new one if no tensor is missing.

        in_flight: as for LLM.update_weights; begin: does what it says with the requests of this process
        """

    @abstractmethod
    def load(self, source: FileSource, in_flight: InFlightPolicy, begin: Callable[[], None]) -> int:
        """Write the tensors of files; returns the new version."""


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


class EngineClient(ABC):
    """What an LLM asks of the engines that compute for it.

    memory: how a device's memory is divided
    on_step: called with the figures of each step, which `counters` add up
    asleep: which memory is offloaded
    """

    memory: MemoryPlan
    updater: Updater
    adapters: Adapters
    steerings: Steerings

    def __init__(self) -> None:
        self.on_step: Callable[[StepResult], None] | None = None
        self.counters = Counters()
        self.asleep: set[Tag] = set()

    @abstractmethod
    def consistent(self) -> AbstractContextManager[None]:
        """Return a context in which an error ends the calls of all peers, if there are peers."""

    @abstractmethod
    def check_open(self) -> None:
        """Raise ValueError if it is closed, WorkerError with the cause if it has failed, RuntimeError in a fork."""

    def check_writable(self) -> None:
        """Raise RuntimeError if the weights are offloaded, and as check_open does."""
        self.check_open()
        self._check_awake("weights")

    def check_ready(self) -> None:
        """Raise RuntimeError if it sleeps or its weights are incomplete, and as check_open does."""
        self.check_open()
        self._check_awake("weights", "kv_cache")
        if lacks := self.updater.lacks:
            raise RuntimeError(
                "the weights are incomplete: an update of them has not ended well, or sleep(level=2) has dropped them;"
                f" missing: {lacks}; write these by update_weights(named_tensors, partial=True), in one call or in"
                " several, or all of them by update_weights(named_tensors) with partial=False, or by"
                " load_weights(model)"
            )

    def _check_awake(self, *tags: Tag) -> None:
        """Raise RuntimeError if anything of this is offloaded."""
        if self.asleep.intersection(tags):
            raise RuntimeError(f"this LLM sleeps, and has lent its {' and '.join(sorted(self.asleep))}: call wake_up()")

    @abstractmethod
    def reset_prefix_cache(self) -> None:
        """Let no later request share what has been computed so far."""

    @abstractmethod
    def load_prefix(self, folder: str) -> int:
        """Let later requests find what a folder holds; returns how many tokens. Raises as StoredPrefixes does."""

    @abstractmethod
    def sleep(self, keep_weights: bool) -> None:
        """Offload the memory, while no request runs. Raises RuntimeError if there is no room for kept weights."""

    @abstractmethod
    def wake_up(self, tags: Collection[str]) -> None:
        """Restore what the tags name. Raises RuntimeError if a device has no room; some then stays offloaded."""

    @abstractmethod
    def close(self) -> None:
        """Give back all memory and processes; safe to call twice."""
