"""Replicas: the processes of several engines, which start, compute, sleep and end together; one may die alone."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from copy import copy
from enum import Enum, auto
from multiprocessing.connection import wait
from typing import Any

from torch import Tensor

from nanoinfer.config import Config
from nanoinfer.engine.client import EngineClient
from nanoinfer.engine.ranks.sleeper import TAGS
from nanoinfer.engine.ranks.workers import CLOSE_SECONDS, WorkerError, check_spawning
from nanoinfer.engine.results.step_result import StepResult
from nanoinfer.parallel.buckets import SharedSegment
from nanoinfer.process.interrupts import delayed_interrupt
from nanoinfer.replicas.adapters import ReplicaAdapters
from nanoinfer.replicas.messages import Failed, Ready, Reply, Report
from nanoinfer.replicas.steerings import ReplicaSteerings
from nanoinfer.replicas.transports.process import ReplicaProcess, Transport
from nanoinfer.replicas.transports.spawned import Spawning
from nanoinfer.replicas.updater import ReplicaUpdater
from nanoinfer.replicas.weight_transfer import write_chunks
from nanoinfer.requests.tasks.messages import Task
from nanoinfer.runner.memory.plan import tell
from nanoinfer.runner.start.voice import Voice

log = logging.getLogger("nanoinfer")


class Change(Enum):
    """What becomes of a replica: it takes tasks from now on, or is gone with those that it had."""

    JOINED = auto()
    LOST = auto()


Event = tuple[int, Report | Change]  # of a replica


class Replicas(EngineClient):
    """The replicas' processes.

    memory: the plan of the replica with the fewest blocks
    hardware: what each rank of that replica computes with
    """

    hardware: str
    updater: ReplicaUpdater
    adapters: ReplicaAdapters
    steerings: ReplicaSteerings
    _config: Config

    def __init__(self, config: Config) -> None:
        """Start the processes, which import what they need and wait for `begin`. Of config, the options are enough."""
        super().__init__()
        self.updater = ReplicaUpdater(self)
        self.adapters = ReplicaAdapters(self, config.max_adapters, config.restart_replicas)
        self.steerings = ReplicaSteerings(self, config.max_steerings)
        self._owner = os.getpid()
        self._is_started = False
        self._failure: str | None = None  # why all have ended
        self._events: list[Event] = []
        self._round = 0  # of tasks, from one drop of all to the next
        self._num_calls = 0
        self._asked: set[int] = set()  # the replicas that have not answered the newest call
        self._answers: dict[int, Reply] = {}  # by replica, to that call
        self._transport = transport_of(config)
        self._processes: dict[int, ReplicaProcess] = {}
        self._newcomers: list[int] | None = None  # those that `without_newcomers` keeps waiting; None: it keeps none
        self._finalizer = weakref.finalize(self, _close, self._owner, self._processes, self._transport)
        try:
            for index in range(config.data_parallel_size):
                with delayed_interrupt():
                    self._processes[index] = self._transport.start(config, index)
        except BaseException:
            self._finalizer()
            raise

    def begin(self, config: Config) -> None:
        """Let all engines start; `wait_until_ready` tells how that ended."""
        self._config = copy(config)  # LLM writes into its own
        self._config.use_tqdm = False
        self._config.layer_files = self._transport.layer_files(config)
        first = copy(self._config)  # its bars stand for those of all, if a terminal watches this process
        first.use_tqdm = Voice(config).is_heard
        for index, process in self._processes.items():
            process.begin(self._config if index else first)

    def wait_until_ready(self) -> None:
        """Wait for all engines. Raises the ValueError of one that cannot start, or WorkerError if one dies."""
        started: list[Ready] = []
        try:
            while len(started) < len(self._processes):
                started += self._receive()
        except BaseException:
            self._finalizer()
            raise
        self.memory, self.hardware = min(started, key=lambda ready: ready.memory.blocks)
        tell(self._config, self.memory)
        self._config.max_model_len = self.memory.max_model_len
        self._config.fits_length = False  # those that restart hold such a sequence, or do not start
        self.tell_all("limit", self.memory.max_model_len)
        self._is_started = True

    @property
    def ready(self) -> list[int]:
        """The replicas that take tasks."""
        return list(self._ready_processes)

    @property
    def _ready_processes(self) -> dict[int, ReplicaProcess]:
        return {index: process for index, process in self._processes.items() if process.is_ready}

    @property
    def pids(self) -> dict[int, int]:
        """Each replica's process."""
        return {index: process.pid for index, process in self._processes.items()}

    def send(self, index: int, method: str, *args: Any) -> None:
        """Let a replica call one of its methods; it does not answer. A fork tells it nothing."""
        if self._owner == os.getpid():
            self._processes[index].send(method, *args)

    def tell_all(self, method: str, *args: Any) -> None:
        """Let all replicas call one of their methods; they do not answer."""
        for index in self.ready:
            self.send(index, method, *args)

    def hand_out(self, index: int, tasks: list[Task]) -> None:
        """Let a replica queue tasks."""
        self.send(index, "queue_tasks", self._round, tasks)

    def drop_tasks(self) -> None:
        """Let all replicas forget all tasks; what they still tell of these is no event."""
        self._round += 1
        self.tell_all("drop")

    @property
    def has_events(self) -> bool:
        """Whether a replica has told something, come or gone, of which `take_events` has not told."""
        return bool(self._events)

    def wait_for_event(self) -> None:
        """Wait for an event. Raises WorkerError if no replica is left."""
        while not self._events:
            self._receive()

    def take_events(self) -> list[Event]:
        """Return the events since the last call, in the order in which they came."""
        events, self._events = self._events, []
        return events

    def call(self, method: str, *args: Any) -> list[Any]:
        """Let all replicas call one of their methods; returns what it returns, and raises the first error of it.

        A replica that dies meanwhile is left out.
        """
        self.ask(method, dict.fromkeys(self.ready, args))
        while self._asked:
            self._receive()
        answers = list(self._answers.values())
        for answer in answers:
            if answer.error is not None:
                raise answer.error
        return [answer.value for answer in answers]

    def ask(self, method: str, args: dict[int, tuple[Any, ...]]) -> None:
        """Let replicas call one of their methods, each with its own arguments, and wait for no answer."""
        self._num_calls += 1
        self._answers.clear()
        self._asked = set(args)
        for index, own in args.items():
            self.send(index, "call", self._num_calls, method, own)

    def send_tensors(
        self, tensors: Iterable[tuple[str, Tensor]], segment: SharedSegment, method: str, *args: Any
    ) -> list[Any]:
        """Let all replicas call one of their methods that takes tensors, and bring it these; returns what it returns.

        Raises the first error of a replica, or that of the tensors' source, and then breaks off everywhere.
        """
        answers: list[Any] = []
        with self._transport.mirrored(segment, self._ready_processes) as mirrors:
            try:
                self.ask(method, {index: (own, *args) for index, own in mirrors.segments.items()})
                for chunks, is_last in write_chunks(tensors, segment):
                    mirrors.copy()
                    answers = self.call("receive", chunks, is_last)
                    self.check_open()  # the source runs code that is not ours
            except BaseException:
                with delayed_interrupt(), suppress(RuntimeError):
                    self.call("receive", None, True)
                raise
        return answers

    def _receive(self) -> list[Ready]:
        """Wait for messages, and sort them; returns those of replicas that have started."""
        self.check_open()
        started: list[Ready] = []
        pipes = {process.pipe: index for index, process in self._processes.items()}
        for pipe in wait(pipes):
            index = pipes[pipe]  # type: ignore[index]  # they are pipes, as they were given
            with delayed_interrupt():
                match self._processes[index].receive():
                    case Report() as report:
                        if report.round == self._round:
                            self._events.append((index, report))  # first, for on_step may raise
                        self._note_steps(index, report)
                    case Reply() as reply:
                        if reply.call == self._num_calls:
                            self._answers[index] = reply
                            self._asked.discard(index)
                    case Ready() as ready:
                        started.append(ready)
                        if self._newcomers is None:
                            self._join(index)
                        else:
                            self._newcomers.append(index)
                    case Failed() | None:
                        self._lose(index)
        return started

    def _join(self, index: int) -> None:
        """Let a replica take tasks that has started."""
        if index in self._processes:
            self._processes[index].is_ready = True
            self.adapters.restore_on(index)
            self.steerings.restore_on(index)
            self._events.append((index, Change.JOINED))

    @contextmanager
    def without_newcomers(self) -> Iterator[None]:
        """Return a context in which no replica joins: it would miss the first half of what the others are told."""
        self._newcomers = []
        try:
            yield
        finally:
            with delayed_interrupt():
                newcomers, self._newcomers = self._newcomers, None
                for index in newcomers:
                    self._join(index)

    def _note_steps(self, index: int, report: Report) -> None:
        for figures in report.figures:
            result = StepResult([], [], *figures, replica=index)
            report.progress.steps.append(result)
            if self.counters.covers(result):
                self.counters.note_step(result, self.on_step)
            elif self.on_step is not None:
                self.on_step(result)

    def _lose(self, index: int) -> None:
        """Go on without a replica that is dead. Raises WorkerError if it was the last.

        While the replicas start, raise the ValueError that it told of, or WorkerError.
        """
        process = self._processes.pop(index)
        self._asked.discard(index)
        reason = f"replica {index} {process.reason()}"
        process.kill()
        process.join(CLOSE_SECONDS)
        if not self._is_started:
            refused = None if process.failure is None else process.failure.error
            raise refused or WorkerError(reason)
        if process.is_ready:
            self._events.append((index, Change.LOST))
        told, restarts = self._what_next(process.is_ready)
        log.warning("%s; %s", reason, told)
        if restarts:
            self._processes[index] = self._transport.start(self._config, index)
            self._processes[index].begin(self._config)
        if not self._processes:
            self._fail(f"no replica is left: {reason}")

    def _what_next(self, was_ready: bool) -> tuple[str, bool]:
        """Say what happens when a replica has died, and whether it starts again."""
        left = f"the others compute its requests; replicas that are left: {len(self.ready)}"
        if not was_ready:
            return f"it was starting again, and is given up; {left}", False
        if not self._config.restart_replicas:
            return left, False
        if self.asleep or self.updater.lacks:
            return f"it does not start again, because the others sleep or have incomplete weights; {left}", False
        if self.updater.version:
            return f"it does not start again, because it would have the checkpoint's weights; {left}", False
        return f"it starts again; {left}", True

    def wait_for_one(self) -> None:
        """Wait until a replica is ready."""
        while not self.ready:
            self._receive()

    def end_starting(self) -> None:
        """Wait until a replica is ready, and end those that start again.

        They would miss what the others are told now.
        """
        self.wait_for_one()
        for index in [index for index, process in self._processes.items() if not process.is_ready]:
            process = self._processes.pop(index)
            process.kill()
            process.join(CLOSE_SECONDS)
            log.warning("replica %d was starting again, and is given up: the others change", index)

    def _fail(self, reason: str) -> None:
        self._failure = reason
        self._finalizer()
        self.check_open()

    def close(self) -> None:
        """End all replicas; safe to call twice."""
        with delayed_interrupt():
            self._finalizer()

    def consistent(self) -> AbstractContextManager[None]:
        """Return an empty context: there are no peers."""
        return nullcontext()

    def check_open(self) -> None:
        """Raise ValueError if close has been called, WorkerError if no replica is left, RuntimeError in a fork."""
        if self._owner != os.getpid():
            raise RuntimeError(f"this LLM's replicas serve process {self._owner}, and not its fork: make another here")
        if self._failure is not None:
            raise WorkerError(f"this LLM is closed, make another: {self._failure}")
        if not self._finalizer.alive:
            raise ValueError("this LLM is closed: make another")

    def reset_prefix_cache(self) -> None:
        """Let no later request share what has been computed so far."""
        self.tell_all("reset_prefix_cache")

    def load_prefix(self, folder: str) -> int:
        """Let all replicas load a prefix, and those that start again do without."""
        self.wait_for_one()
        with self.without_newcomers():
            counts: list[int] = self.call("load_prefix", folder)
        return max(counts, default=0)

    def sleep(self, keep_weights: bool) -> None:
        """Offload the devices' memory, while no request runs. Raises RuntimeError as LLMEngine.sleep does."""
        self.end_starting()
        with delayed_interrupt():
            before, self.asleep = self.asleep, set(TAGS)  # a replica that dies now must not start again
            try:
                self.call("sleep", keep_weights)
            except RuntimeError:
                self.call("wake_up", set(TAGS) - before)  # the others have fallen asleep
                self.asleep = before
                raise
            if not keep_weights:
                self.updater.drop()
                self.adapters.drop()
                self.steerings.drop()

    def wake_up(self, tags: Collection[str]) -> None:
        """Restore what the tags name. Raises RuntimeError as LLMEngine.wake_up does."""
        with delayed_interrupt():
            self.call("wake_up", tags)
            self.asleep.difference_update(tags)


def transport_of(config: Config) -> Transport:
    """Return what starts the replicas. Raises ValueError if this process cannot start others."""
    if config.data_parallel_backend == "ray":
        from nanoinfer.replicas.transports.ray_process import OnRay  # here, for most LLMs do without Ray

        return OnRay()
    check_spawning(config.named_replicas, "replica")
    return Spawning()


def _close(owner: int, processes: dict[int, ReplicaProcess], transport: Transport) -> None:
    """End all replicas: those that do not listen are killed."""
    if owner != os.getpid():
        return  # this is a fork
    for process in processes.values():
        if process.is_ready:
            process.send("close")
        else:
            process.kill()
    deadline = time.monotonic() + CLOSE_SECONDS
    for process in processes.values():
        process.join(max(deadline - time.monotonic(), 0))
    processes.clear()
    transport.close()
