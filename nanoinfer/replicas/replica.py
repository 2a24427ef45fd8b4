"""The life of a replica: an engine in a process of its own, which computes the tasks that arrive."""

from __future__ import annotations

import math
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from multiprocessing.connection import Connection, wait
from operator import attrgetter
from queue import SimpleQueue
from typing import Any

import torch

from nanoinfer.config import Config
from nanoinfer.engine.client import InFlightPolicy, LoadedAdapter
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.engine.ranks.workers import VERDICT_SECONDS
from nanoinfer.engine.sequence import Sequence, SequenceStatus
from nanoinfer.media.spans import MediaPrompt
from nanoinfer.parallel.buckets import SharedSegment
from nanoinfer.parallel.channel import BEAT_SECONDS
from nanoinfer.process.collector import frozen
from nanoinfer.replicas.messages import Failed, Message, Ready, Reply, Report, StepFigures
from nanoinfer.replicas.weight_transfer import Shape, TensorChunk, read_chunks, unpacked
from nanoinfer.requests.prompts.media import MediaInputs
from nanoinfer.requests.settings import SettingsReader
from nanoinfer.requests.tasks.messages import Task
from nanoinfer.requests.tasks.tasks import Tasks
from nanoinfer.requests.text.texts import TextTokenizer
from nanoinfer.requests.text.tokenizer import load_tokenizer
from nanoinfer.runner.start.voice import name_hardware
from nanoinfer.runner.steering import Vectors
from nanoinfer.weights.adapters.config import AdapterConfig
from nanoinfer.weights.adapters.low_rank import Adapter
from nanoinfer.weights.adapters.source import AdapterSource
from nanoinfer.weights.sources import FileSource, TensorSource

QUIET_SECONDS = 0.1  # without a report, while requests run
FIGURES = attrgetter(*StepFigures._fields)


@frozen()  # what is imported stays
def run_replica(
    pipe: Connection, beats: Connection, parents: list[int], check: Callable[[Config], object] | None = None
) -> None:
    """Live as one replica: start an engine for the Config that arrives, then do what arrives until "close".

    parents: what is ready when the process that starts this one is gone
    check: called with the Config first; it may raise ValueError
    """
    try:
        config: Config = pipe.recv()
    except (EOFError, OSError):  # the LLM's process is gone
        return
    outbox = Outbox(pipe)
    life = Life(outbox, beats, config, parents)
    try:
        if check is not None:
            check(config)
        replica = Replica(config, pipe, outbox, life)
        runner = replica.engine.ranks.runner
        outbox.send(Ready(replica.engine.memory, name_hardware(runner.device, runner.threads)))
        life.is_running = True
        replica.run()
        replica.engine.close()
    except BaseException as error:
        users = error if isinstance(error, ValueError) and not life.is_running else None
        if users is None:
            traceback.print_exc()  # the LLM's process shows the last line alone
        told = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if isinstance(error, torch.AcceleratorError):
            told = told.partition("\n")[0]  # advice on debugging follows
        outbox.send(Failed(users, told))
        raise SystemExit(1) from None


class Outbox:
    """Sends messages to the LLM's process, from several threads."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._lock = pipe, threading.Lock()

    def send(self, message: Message) -> None:
        """Send a message whole."""
        with self._lock:
            self._pipe.send(message)


class Life:
    """A thread that shows the LLM's process that this one lives, and ends this one when the other is gone.

    It also ends this process when a step takes too long: then the device hangs, and the main thread waits for it.

    is_running: the replica has started
    step: the number of the step that the main thread makes; None: it makes none
    """

    def __init__(self, outbox: Outbox, beats: Connection, config: Config, parents: list[int]) -> None:
        self.is_running = False
        self.step: int | None = None
        self._watched: int | None = None  # the step that was under way at the last beat
        self._waits = 0  # how many beats it has seen
        self._outbox, self._beats, self._parents = outbox, beats, parents
        self._timeout = config.worker_timeout if config.device == "cuda" else math.inf
        threading.Thread(target=self._live, name="nanoinfer-life", daemon=True).start()

    def _live(self) -> None:
        while not wait(self._parents, timeout=BEAT_SECONDS):
            if self._is_stuck():
                self._outbox.send(Failed(None, f"a step was not done after {self._timeout:g} s (worker_timeout)"))
                break
            try:
                self._beats.send_bytes(b".")
            except OSError:
                break
        os._exit(1)

    def _is_stuck(self) -> bool:
        """Whether a step takes too long; called at each beat."""
        step = self.step
        # Count waits, not the time that has passed: a Ctrl-Z stops this process, too.
        self._waits = self._waits + 1 if step is not None and step == self._watched else 0
        self._watched = step
        # Ranks of this replica find out themselves who is stuck, a little sooner.
        return self._waits * BEAT_SECONDS > self._timeout + 2 * VERDICT_SECONDS


class Replica:
    """One engine and its tasks.

    No interrupt reaches it, and an error ends it. The error is told before anything is freed, which ends the process
    if PyTorch aborts.
    """

    def __init__(self, config: Config, pipe: Connection, outbox: Outbox, life: Life) -> None:
        self.engine = LLMEngine(config)
        tokenizer = load_tokenizer(config, is_replica=True)
        self._tasks = Tasks(self.engine, tokenizer)
        self._media = MediaInputs(config, tokenizer) if config.sees else None
        self._settings = SettingsReader(config, TextTokenizer(config, tokenizer))
        self._pipe, self._outbox, self._life = pipe, outbox, life
        self._inbox: SimpleQueue[tuple[str, tuple[Any, ...]]] = SimpleQueue()
        self._round = 0
        self._call = 0  # the newest call's number
        self._refused = ""  # why what took a trainer's tensors last has failed
        self._adapter: Adapter = {}  # the newest one that `read_adapter` has checked
        self._unbegun: deque[Sequence] = deque()
        self._reported_at = 0.0

    def run(self) -> None:
        """Do what arrives, and steps while requests run, until "close"."""
        threading.Thread(target=self._receive, name="nanoinfer-inbox", daemon=True).start()
        for step in count():
            while not self._inbox.empty() or not self._can_step:
                method, args = self._inbox.get()
                if method == "close":
                    return
                self._method(method)(*args)
            self._life.step = step
            self._tasks.step()
            self._life.step = None
            self._report()

    def _method(self, name: str) -> Callable[..., Any]:
        """Return what the LLM's process calls: a method of this class, or of the engine."""
        method: Callable[..., Any] = getattr(self, name, None) or getattr(self.engine, name)
        return method

    @property
    def _can_step(self) -> bool:
        """Whether there are tasks, which wait for no weights after an update that broke off."""
        return self._tasks.are_left and not self.engine.updater.missing

    def _receive(self) -> None:
        """Take what arrives at once: the other process must never wait for this one, which may wait for it."""
        try:
            while True:
                self._inbox.put(self._pipe.recv())
        except (EOFError, OSError):
            self._inbox.put(("close", ()))

    def _report(self, at_once: bool = False) -> None:
        """Tell what is new, all at once, if anything has begun or ended, and otherwise now and then."""
        begun = 0
        while self._unbegun and _has_begun(self._unbegun[0]):
            self._unbegun.popleft()
            begun += 1
        now = time.monotonic()
        if at_once or begun or self._tasks.has_progress or now - self._reported_at > QUIET_SECONDS:
            progress = self._tasks.take_progress()
            figures = [StepFigures._make(FIGURES(step)) for step in progress.steps]
            self._outbox.send(Report(self._round, begun, figures, progress._replace(steps=[])))
            self._reported_at = now

    def limit(self, max_model_len: int) -> None:
        """Let no sequence be longer than the replica with the fewest blocks allows: results would differ."""
        self.engine.config.max_model_len = max_model_len

    def queue_tasks(self, round: int, tasks: list[Task]) -> None:
        """Queue tasks of a round."""
        self._round = round
        for task in tasks:
            if isinstance(task.prompt, MediaPrompt) and self._media is not None:
                self._media.adopt(task.prompt)
            grammar = self._settings.compile("sampling_params", task.params)
            self._unbegun += self._tasks.queue_one(task._replace(grammar=grammar))

    def abort(self, number: int) -> None:
        """End the tasks of a request."""
        self._tasks.abort(number)
        self._report()

    def drop(self) -> None:
        """Drop all tasks: those that come next are of another round."""
        self._report(at_once=True)  # the figures of their steps count
        self._tasks.drop()
        self._unbegun.clear()

    def call(self, number: int, method: str, args: tuple[Any, ...]) -> None:
        """Answer a call of one of the methods below, or of the engine's; number: the call's."""
        value, error = None, None
        self._call = number
        try:
            value = self._method(method)(*args)
        except Exception as caught:
            if self.engine.ranks.is_closed:
                raise
            told = f"{type(caught).__name__}: {caught}"
            error = caught if isinstance(caught, (ValueError, RuntimeError)) else RuntimeError(told)
        self._report()  # in_flight="abort" has ended some
        self._outbox.send(Reply(self._call, value, error))

    def load_weights(self, source: FileSource, in_flight: InFlightPolicy, version: int) -> None:
        """Write the weights of files, which have this version. Raises ValueError as Updater.load does."""
        updater = self.engine.updater
        updater.version = version - 1  # it may have come further when another replica failed
        updater.load(source, in_flight, self._preparing(in_flight))

    def check_weights(self, shapes: list[Shape], is_partial: bool) -> None:
        """Raise ValueError if a trainer's tensors do not fit."""
        without_numbers = [(name, torch.zeros((), dtype=dtype).expand(sizes)) for name, sizes, dtype in shapes]
        for _ in TensorSource(without_numbers, is_partial).tensors(self.engine.ranks.runner.holdings.weights.table):
            pass

    def update_weights(
        self, segment: SharedSegment, is_partial: bool, in_flight: InFlightPolicy, version: int, anew: bool
    ) -> tuple[int, str]:
        """Write a trainer's tensors, as they arrive; returns the version that is reached, and what is still missing.

        version: the one that whole weights will have; anew: those that have come here before do not count

        Raises ValueError as Updater.update does.
        The answer to the last call of `receive` is the answer to this one.
        """
        updater = self.engine.updater
        updater.version = version - 1  # it may have come further when another replica failed
        if anew:
            updater.drop()
        source = TensorSource(read_chunks(self._received(), segment), is_partial, may_be_empty=True)
        with self._refusing():
            updater.update(source, in_flight, self._preparing(in_flight))
        return updater.version, updater.lacks

    def read_adapter(self, segment: SharedSegment, name: str, config: AdapterConfig) -> LoadedAdapter:
        """Check an adapter whose tensors arrive, for `write_adapter`; returns what there is to know of it.

        Raises ValueError as Adapters.read does.
        The answer to the last call of `receive` is the answer to this one.
        """
        with self._refusing():
            source = AdapterSource(name, config, list(read_chunks(self._received(), segment)))
            self._adapter = self.engine.adapters.read(source)
        return self.engine.adapters.describe(name, self._adapter)

    def write_adapter(self, name: str, in_flight: InFlightPolicy) -> None:
        """Load the adapter that `read_adapter` has checked."""
        adapter, self._adapter = self._adapter, {}
        self.engine.adapters.write(name, adapter, self._preparing(in_flight, name))
        self._report()  # in_flight="abort" has ended some

    def adopt_adapter(self, name: str, config: AdapterConfig, tensors: list[tuple[Shape, bytes]]) -> None:
        """Load an adapter that the other replicas have, before there are tasks."""
        self._adapter = self.engine.adapters.read(AdapterSource(name, config, unpacked(tensors)))
        self.write_adapter(name, "keep")

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter, of which no tasks are left."""
        self.engine.adapters.unload(name)

    def load_steering(self, name: str, vectors: Vectors) -> None:
        """Load vectors, which fit the model."""
        self.engine.steerings.load(name, vectors)

    def unload_steering(self, name: str) -> None:
        """Forget vectors, of which no tasks are left."""
        self.engine.steerings.unload(name)

    def _preparing(self, in_flight: InFlightPolicy, adapter: str | None = None) -> Callable[[], None]:
        """Return the function that prepares tasks for new weights."""
        return partial(self._tasks.prepare_for_weights, in_flight, adapter)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Remember an error of the block, which `receive` tells if more tensors come."""
        try:
            yield
        except Exception as error:
            self._refused = str(error)
            raise

    def _received(self) -> Iterator[list[TensorChunk]]:
        """Yield what arrives by calls of `receive`, each of which is answered when the next is awaited."""
        is_first = True
        while True:
            if not is_first:
                self._outbox.send(Reply(self._call, None, None))
            is_first = False
            method, args = self._inbox.get()
            if method != "call":
                raise RuntimeError(f"new weights were broken off by {method}")
            self._call, _, (chunks, is_last) = args
            if chunks is None:
                raise RuntimeError("new weights were broken off")
            yield chunks
            if is_last:
                return

    def receive(self, chunks: list[TensorChunk] | None, is_last: bool) -> None:
        """Raise RuntimeError: what took the tensors has failed here already; None: it breaks off everywhere."""
        if chunks is not None:
            raise RuntimeError(f"a replica could not take the tensors: {self._refused}")

    def has_mixed_weights(self, version: int) -> bool:
        """Whether an update to this version, which failed, has written anything."""
        return bool(self.engine.updater.missing) or self.engine.updater.version == version


def _has_begun(seq: Sequence) -> bool:
    return seq.status is not SequenceStatus.WAITING or bool(seq.block_tables)
