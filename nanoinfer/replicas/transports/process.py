"""ReplicaProcess: a replica as the LLM's process sees it, from its start to its end."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from nanoinfer.config import Config
from nanoinfer.engine.ranks.workers import START_SECONDS
from nanoinfer.parallel.buckets import SharedSegment
from nanoinfer.parallel.channel import BEAT_SECONDS
from nanoinfer.process.interrupts import delayed_interrupt
from nanoinfer.replicas.messages import Failed, Message


class ReplicaProcess(ABC):
    """A replica's process, the pipe to it, and a thread that kills it when it gives no sign of life.

    is_ready: it has started, and takes tasks
    failure: the error that it told of before it ended, if it did
    pipe: what it sends
    """

    pipe: Connection
    _beats: Connection | None  # None: it has none yet

    def __init__(self, config: Config, index: int) -> None:
        self.is_ready = False
        self.failure: Failed | None = None
        self._timeout = config.worker_timeout
        self._problem: str | None = None  # why this process gave it up
        self._watcher = threading.Thread(target=self._watch, name=f"nanoinfer-watcher-{index}", daemon=True)

    def begin(self, config: Config) -> None:
        """Let the replica start its engine. If it is dead, nothing happens: `receive` will tell."""
        self._watcher.start()
        self._send(config)

    @property
    @abstractmethod
    def pid(self) -> int:
        """The process's number."""

    def send(self, method: str, *args: Any) -> None:
        """Let the replica call one of its methods. If it is dead, nothing happens: `receive` will tell."""
        self._send((method, args))

    def _send(self, message: object) -> None:
        with self._whole(), suppress(OSError):  # a pipe of a dead process is broken, one of another machine reset
            self.pipe.send(message)

    def receive(self) -> Message | None:
        """Return what the replica has sent, for which the pipe is ready; None: it is dead."""
        with self._whole():
            try:
                message: Message = self.pipe.recv()
            except (EOFError, OSError):  # OSError: it died in the middle of a message
                return None
        if isinstance(message, Failed):
            self.failure = message
        return message

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Enclose what sends or receives one message. An interrupt waits; a second one ends the replica.

        Half a message would garble what follows.
        """
        with delayed_interrupt():
            try:
                yield
            except KeyboardInterrupt:
                self.kill()
                raise

    def _watch(self) -> None:
        assert self._beats is not None
        # Count waits, not the time that has passed: a Ctrl-Z stops this process, too.
        silence, was_ready = 0.0, False
        while True:
            try:
                if self._beats.poll(BEAT_SECONDS):
                    self._beats.recv_bytes()
                    silence = 0.0
                    continue
            except (EOFError, OSError):
                return  # the process has ended
            silence = silence + BEAT_SECONDS if was_ready == self.is_ready else 0.0  # starting may have held it up
            was_ready = self.is_ready
            limit, hint = self._timeout, "(worker_timeout)"
            if not self.is_ready and limit < START_SECONDS:
                limit, hint = START_SECONDS, "while starting; a larger worker_timeout is waited for longer"
            if silence > limit:
                self._problem = f"hangs: no sign of life for {limit:g} s {hint}"
                self.kill()
                return

    def reason(self) -> str:
        """Return why the process has ended, or is about to."""
        if self._problem is not None:
            return self._problem
        return f"died: {self._last_words() if self.failure is None else self.failure.told}"

    @abstractmethod
    def _last_words(self) -> str:
        """Say how the process ended that told of no error."""

    @abstractmethod
    def kill(self) -> None:
        """End the process now."""

    def join(self, seconds: float) -> None:
        """Wait for the process to end, and kill it if it does not; give its pipes back."""
        self._join(seconds)
        if self._watcher.ident is not None and self._watcher is not threading.current_thread():
            self._watcher.join()
        self.pipe.close()
        if self._beats is not None:
            self._beats.close()

    @abstractmethod
    def _join(self, seconds: float) -> None:
        """Wait for the process to end, and kill it if it does not."""


class Mirrors(NamedTuple):
    """A segment of this process's memory, as each replica has it.

    segments: by replica, the segment that it maps
    copy: brings what this process's segment holds into them
    """

    segments: dict[int, SharedSegment]
    copy: Callable[[], None]


class Transport(ABC):
    """Starts replicas of one kind, and brings them tensors."""

    @abstractmethod
    def start(self, config: Config, index: int) -> ReplicaProcess:
        """Start a replica, which imports what it needs and waits for `begin`. Of config, the options are enough."""

    def layer_files(self, config: Config) -> tuple[str, ...]:
        """Return, for each rank, a file in memory for streamed layers that all replicas have; (): each has its own."""
        return ()

    def close(self) -> None:
        """Give back what the replicas had of this process, once they have ended."""

    @abstractmethod
    def mirrored(self, segment: SharedSegment, processes: dict[int, ReplicaProcess]) -> AbstractContextManager[Mirrors]:
        """Return a context in which these replicas have a segment, too."""
