"""EngineClient: what an LLM asks of an engine in its process, or of replicas in others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Literal

from nanoinfer.engine.adapters import Adapters
from nanoinfer.engine.results.stats import Counters
from nanoinfer.engine.results.step_result import StepResult
from nanoinfer.runner.memory.lender import Tag
from nanoinfer.runner.memory.plan import MemoryPlan
from nanoinfer.weights.sources import FileSource, TensorSource

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


class EngineClient(ABC):
    """What an LLM asks of the engines that compute for it.

    memory: how a device's memory is divided
    on_step: called with the figures of each step, which `counters` add up
    asleep: which memory is offloaded
    """

    memory: MemoryPlan
    updater: Updater
    adapters: Adapters

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
    def sleep(self, keep_weights: bool) -> None:
        """Offload the memory, while no request runs. Raises RuntimeError if there is no room for kept weights."""

    @abstractmethod
    def wake_up(self, tags: Collection[str]) -> None:
        """Restore what the tags name. Raises RuntimeError if a device has no room; some then stays offloaded."""

    @abstractmethod
    def close(self) -> None:
        """Give back all memory and processes; safe to call twice."""
