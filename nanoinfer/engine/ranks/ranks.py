"""Ranks: this process's rank and those beside it, which live and end together."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from nanoinfer.config import Config
from nanoinfer.engine.ranks.peers import Peers
from nanoinfer.engine.ranks.workers import WorkerError, Workers
from nanoinfer.parallel.buckets import Buckets, DeviceBuckets, SharedBuckets
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.process.interrupts import delayed_interrupt
from nanoinfer.runner.model_runner import ModelRunner
from nanoinfer.runner.steps.pending_tokens import PendingTokens


class Ranks:
    """They fail fast: an error in one of several ranks ends all of them.

    runner: this process's rank
    workers: the other ranks, if this process has started them
    peers: the other ranks, if they are in a trainer's processes and have engines of their own
    waited: seconds in `wait`, in all
    """

    def __init__(self, config: Config, workers: Workers | None = None) -> None:
        """Start the other ranks, if there are any, and load the model.

        workers: the processes of the other ranks, if these have started already
        """
        self._owner = os.getpid()
        self.waited = 0.0
        self._failure: str | None = None  # why the ranks have ended
        are_several = config.tensor_parallel_size > 1
        self.workers = workers or (Workers(config) if are_several and config.starts_ranks else None)
        self.peers = Peers(config) if are_several and not config.starts_ranks else None
        self._others = self.workers or self.peers
        self._finalizer = weakref.finalize(self, _close, self._owner, self._others, None)
        with self._fail_fast():
            self.runner = self._make_runner(config)
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _close, self._owner, self._others, self.runner)

    def _make_runner(self, config: Config) -> ModelRunner:
        workers = self.workers
        if self.peers is not None:
            return ModelRunner(config, self.peers.tensor_parallel(config.device_of(0), config.deterministic))
        if workers is None:
            return ModelRunner(config, TensorParallel())
        device, in_order = config.device_of(0), config.deterministic
        tp = TensorParallel(0, config.tensor_parallel_size, workers.store, device, workers.check, keeps_order=in_order)
        workers.watch(tp.abort)
        workers.begin(config)
        runner = ModelRunner(config, tp, workers.send)
        workers.end_start()  # by now every rank has built its model
        return runner

    def call(self, method: str, *args: Any) -> Any:
        """Run a method of ModelRunner on every rank; returns this rank's result."""
        with self._fail_fast():
            return self.runner.call(method, *args)

    def tell_workers(self, method: str, *args: Any) -> None:
        """Run a method on the other ranks alone, which this process has started."""
        assert self.workers is not None
        with self._fail_fast():
            self.workers.send(method, args)

    def make_buckets(self, method: str) -> Buckets | None:
        """Return the way of tensors to the ranks that hear of them from this one alone; None: there are none.

        method: reads a bucket on these ranks
        """
        if self.workers is None:
            return None
        send = partial(self.tell_workers, method)
        # Ranks that have inboxes can read each other's memory.
        return SharedBuckets(send) if self.runner.tp.inbox is None else DeviceBuckets(send, self.runner.device)

    def wait(self, tokens: PendingTokens) -> list[Any]:
        """Wait for a step's tokens: see PendingTokens.wait."""
        start = time.perf_counter()
        with self._fail_fast():
            told = tokens.wait(None if self._others is None else self._others.patience())
        self.waited += time.perf_counter() - start
        return told

    def uninterrupted(self) -> AbstractContextManager[object]:
        """Return a context in which a Ctrl-C waits until several ranks are done together; a second one ends them.

        Peers may get it in different steps. So there it does not wait, and ends them.
        """
        if self.peers is not None:
            return self._fail_fast()
        return nullcontext() if self.workers is None else delayed_interrupt()

    def record(self, what: str, *facts: object) -> None:
        """Note what all peers must be told alike; they compare it before they compute."""
        if self.peers is not None:
            self.peers.record(what, *facts)

    def check_consistent(self, what: str, *facts: object) -> None:
        """Note something, and wait until all peers have come to the same call."""
        if self.peers is not None and not self.is_closed:
            self.peers.record(what, *facts)
            with self._fail_fast():
                self.peers.compare()

    @contextmanager
    def consistent(self) -> Iterator[None]:
        """Let peers compare an error of the block, which comes before they compute: no one must go on alone."""
        try:
            yield
        except Exception as error:
            self.check_consistent("error", error)
            raise
        except BaseException as error:
            if self.peers is not None:
                self._fail(error)
            raise

    @contextmanager
    def _fail_fast(self) -> Iterator[None]:
        """End all of several ranks if the block raises: otherwise those that are left would wait forever."""
        try:
            yield
        except BaseException as error:
            if self._others is None:
                raise
            cause = error
            try:
                cause = self._others.explain(error)
            finally:  # explain takes seconds, in which an interrupt may come
                self._fail(cause)
            if cause is error:
                raise
            raise cause from error

    def _fail(self, cause: BaseException) -> None:
        """End all ranks, and remember why."""
        self._failure = str(cause) or type(cause).__name__  # not the error: its traceback keeps what the ranks held
        if alive := self._finalizer.detach():
            _, _, (owner, others, runner), _ = alive
            _close(owner, others, runner, failed=True)

    def close(self) -> None:
        """End the other ranks and give back all memory; safe to call twice."""
        with delayed_interrupt():
            self._finalizer()

    def check_open(self) -> None:
        """Raise ValueError if close has been called, or WorkerError with the cause if the ranks have failed.

        With several ranks, raise RuntimeError in a fork of the process that made them.
        """
        if self._others is not None and self._owner != os.getpid():
            raise RuntimeError(f"this LLM's ranks serve process {self._owner}, and not its fork: make another LLM here")
        if self.is_closed and self._failure is not None:
            raise WorkerError(f"this LLM is closed, make another: {self._failure}")
        if self.is_closed:
            raise ValueError("this LLM is closed: make another")

    @property
    def is_closed(self) -> bool:
        """Whether close has been called, or the ranks have failed."""
        return not self._finalizer.alive


def _close(owner: int, others: Workers | Peers | None, runner: ModelRunner | None, failed: bool = False) -> None:
    """End all ranks; after a failure, kill the other ranks, because they may not listen."""
    if owner != os.getpid():
        return  # this is a fork: the ranks belong to the process that made them
    if others is not None:
        failed = not others.stop(failed)
    if runner is not None:
        runner.close(failed)
    if others is not None:
        others.join()
