"""What an LLM needs of those that run its requests: one engine in its process, or replicas in others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any, Generic, Literal, Protocol, TypeVar

from nanoinfer.checks import as_int, short
from nanoinfer.engine.ranks.adapters import AnyAdapters
from nanoinfer.engine.results.stats import Counters
from nanoinfer.engine.results.step_result import StepResult
from nanoinfer.engine.sequence import FinishReason
from nanoinfer.requests.outputs import RequestOutput, StreamOutput
from nanoinfer.requests.prompts import Prepared
from nanoinfer.requests.results import SampleResult
from nanoinfer.runner.memory.plan import MemoryPlan
from nanoinfer.weights.sources import FileSource, TensorSource

Fate = Literal["recompute", "keep", "abort"]  # of the requests that run when the weights change


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


class AnySample(Protocol):
    """A sample of a request that streams."""

    def take_new(self, index: int) -> StreamOutput:
        """Return the text and tokens since the last call; index: the prompt's place in the list given to LLM.stream."""
        ...


class AnyRequest(Protocol):
    """A prompt and its samples; id: its number among the LLM's requests; num_running: samples that have not ended."""

    id: int
    prompt: Prepared
    num_running: int

    @property
    def samples(self) -> Collection[AnySample]:
        """Its samples."""
        ...

    def output(self) -> RequestOutput:
        """Return the result, once all samples have ended."""
        ...

    def first_result(self) -> SampleResult:
        """Return the result of the first sample, once it has ended."""
        ...


R = TypeVar("R", bound=AnyRequest)
S = TypeVar("S", bound=AnySample)


class AnyRequests(ABC, Generic[R, S]):
    """The requests whose outputs have not been returned yet.

    Change requests only inside `with requests:`. If the block is left by an exception (Ctrl-C too), every request is
    dropped, because one may be half-updated. If Ctrl-C interrupts even that, the next `with` completes it.

    finished: the requests whose samples have all ended, in the order in which they ended
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self.finished: list[R] = []
        self._running: dict[int, R] = {}  # by id
        self._changed: list[S] = []  # streaming samples, since the last take_changed
        self._is_settled = True  # no request is half-updated

    def __enter__(self) -> None:
        self.settle()
        self._is_settled = False

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self._is_settled = True
        else:
            self.abort_all()

    def settle(self) -> None:
        """Drop every request if an interrupt has left one half-updated."""
        if not self._is_settled:
            self.abort_all()

    @property
    def num_running(self) -> int:
        """The number of requests that have not ended."""
        return len(self._running)

    @property
    def are_left(self) -> bool:
        """Whether requests have not ended, or nobody has taken their outputs."""
        return bool(self._running or self.finished)

    @property
    @abstractmethod
    def num_added(self) -> int:
        """The number of requests that have been added so far, ended ones included."""

    @abstractmethod
    def add(self, prompt: Prepared, streams: bool = False) -> R:
        """Queue a request; streams: the caller takes each sample's new text and tokens as they come."""

    @abstractmethod
    def add_all(self, prompts: list[Prepared]) -> list[R]:
        """Queue the requests of one call, and return them in the same order.

        If some must wait for others, those that may get more tokens begin sooner. Otherwise a long one that begins late
        runs almost alone in the end.
        """

    @abstractmethod
    def step(self) -> list[StepResult]:
        """Go on until a step has ended, or several; returns their figures."""

    @abstractmethod
    def before_new_weights(self, in_flight: Fate, adapter: str | None = None) -> Callable[[], None]:
        """Return the function that prepares the requests for new weights.

        in_flight: as for LLM.update_weights; adapter: it alone gets new ones, and only its requests are prepared
        """

    def of_adapter(self, name: str) -> list[R]:
        """Return the requests of an adapter that have not ended."""
        return [request for request in self._running.values() if request.prompt.params.adapter == name]

    def _affected(self, adapter: str | None) -> list[R]:
        """Return the requests that new weights change, or those of an adapter."""
        return list(self._running.values()) if adapter is None else self.of_adapter(adapter)

    def find(self, request_id: int) -> R | None:
        """Return the request, or None if it has ended. Raises ValueError for an id that no request has had."""
        known = as_int(request_id)
        if known is None or known not in range(self.num_added):
            raise ValueError(
                f"request_id={short(request_id)}: no request has it; pass a number that add_request returned"
            )
        return self._running.get(known)

    def abort(self, request: R) -> None:
        """End the samples of a request that have not ended, outside or in the middle of `with requests:`."""
        was_settled, self._is_settled = self._is_settled, False
        try:
            self._abort(request)
        except BaseException:
            self.abort_all()
            raise
        self._is_settled = was_settled

    @abstractmethod
    def _abort(self, request: R) -> None:
        """End the samples of a request that have not ended."""

    def abort_all(self) -> None:
        """Drop every request, ended ones included."""
        self._is_settled = False
        self._drop()
        dropped, self._running = self._running, {}
        self._counters.drop([request.num_running for request in dropped.values()])
        self._changed.clear()
        self.finished.clear()
        self._is_settled = True

    @abstractmethod
    def _drop(self) -> None:
        """Let whoever computes drop every request."""

    def _end_sample(self, request: R, reason: FinishReason) -> None:
        """Note that a sample has ended, and its request if it was the last."""
        request.num_running -= 1
        if request.num_running == 0:
            self.finished.append(self._running.pop(request.id))
        self._counters.end_sample(reason, is_last=request.num_running == 0)

    def take_finished(self) -> list[R]:
        """Return the requests that have ended since the last call."""
        finished, self.finished = self.finished, []
        return finished

    def take_changed(self) -> list[S]:
        """Return the streaming samples that have new tokens or ended since the last call; one may be there twice."""
        changed, self._changed = self._changed, []
        return changed


SomeRequests = AnyRequests[Any, Any]
