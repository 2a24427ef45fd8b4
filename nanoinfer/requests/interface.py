"""What an LLM needs of those that run its requests: one engine in its process, or replicas in others."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Protocol

from nanoinfer.engine.ranks.adapters import AnyAdapters
from nanoinfer.engine.results.stats import Counters
from nanoinfer.engine.results.step_result import StepResult
from nanoinfer.requests.tasks.messages import Fate
from nanoinfer.runner.memory.plan import MemoryPlan
from nanoinfer.weights.sources import FileSource, TensorSource


class AnyUpdater(Protocol):
    """Changes the weights; version: the updates that have ended well."""

    version: int

    def update(self, source: TensorSource, in_flight: Fate, begin: Callable[[], None]) -> int:
        """Write a trainer's tensors; returns the version, a new one if no tensor is missing.

        begin: prepares the requests for them
        """
        ...

    def load(self, source: FileSource, in_flight: Fate, begin: Callable[[], None]) -> int:
        """Write the tensors of files; returns the new version."""
        ...


class AnyEngine(Protocol):
    """Whoever computes: LLMEngine, or Replicas.

    on_step: called with the figures of each step, which counters add up
    """

    on_step: Callable[[StepResult], None] | None
    counters: Counters

    @property
    def adapters(self) -> AnyAdapters:
        """Which adapters are loaded, and who loads them."""
        ...

    @property
    def updater(self) -> AnyUpdater:
        """Who changes the weights."""
        ...

    @property
    def memory(self) -> MemoryPlan:
        """How a device's memory is divided."""
        ...

    @property
    def is_sleeping(self) -> bool:
        """Whether weights or KV cache, or both, are lent."""
        ...

    def alike(self) -> AbstractContextManager[None]:
        """Return a context in which an error ends the calls of all peers, if there are peers."""
        ...

    def check_open(self) -> None:
        """Raise ValueError if it is closed, or WorkerError with the cause if it has failed."""
        ...

    def check_ready(self) -> None:
        """Raise RuntimeError if it sleeps or its weights are incomplete, and as check_open does."""
        ...

    def check_writable(self) -> None:
        """Raise RuntimeError if the weights are lent, and as check_open does."""
        ...

    def reset_prefix_cache(self) -> bool:
        """Let no later request share what has been computed so far; returns True when that is done."""
        ...

    def sleep(self, keep_weights: bool) -> None:
        """Lend the memory. Raises RuntimeError if there is no room for kept weights."""
        ...

    def wake_up(self, tags: Collection[str]) -> None:
        """Take back what the tags name. Raises RuntimeError if a device has no room for it."""
        ...

    def close(self) -> None:
        """Give back all memory and processes."""
        ...
