"""ReplicaProcess: a replica as the LLM's process sees it, from its start to its end."""

from __future__ import annotations

import multiprocessing as mp
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from nanoinfer.config import Config
from nanoinfer.engine.ranks.workers import START_SECONDS, hint_of
from nanoinfer.parallel.channel import BEAT_SECONDS
from nanoinfer.process.first_launch import VISIBLE, started_for
from nanoinfer.process.interrupts import delayed_interrupt, interrupts_blocked
from nanoinfer.process.start_method import start_method_open
from nanoinfer.replicas.messages import Failed, Message
from nanoinfer.replicas.replica import run_replica


class ReplicaProcess:
    """A replica's process, the pipe to it, and a thread that kills it when it gives no sign of life.

    is_ready: it has started, and takes tasks
    failure: the error that it told of before it ended, if it did
    pipe: what it sends
    """

    def __init__(self, config: Config, index: int) -> None:
        """Start the process, which imports what it needs and waits for `begin`. Of config, the options are enough."""
        self.is_ready = False
        self.failure: Failed | None = None
        self._timeout = config.worker_timeout
        self._hangs: str | None = None
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._beats, beats = context.Pipe(duplex=False)
        self._process: Any = context.Process(
            target=run_replica, args=(theirs, beats), name=f"nanoinfer-replica-{index}"
        )
        with started_for(config.device_of(0), gpus_of(config, index)), start_method_open(), interrupts_blocked():
            self._process.start()
        mp.process._children.discard(self._process)  # type: ignore[attr-defined]  # or exit would wait for it
        theirs.close()
        beats.close()
        self._watcher = threading.Thread(target=self._watch, name=f"nanoinfer-watcher-{index}", daemon=True)

    def begin(self, config: Config) -> None:
        """Let the replica start its engine. If it is dead, nothing happens: `receive` will tell."""
        self._watcher.start()
        with self._whole(), suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send(config)

    @property
    def pid(self) -> int:
        """The process's number."""
        return int(self._process.pid)

    def send(self, method: str, *args: Any) -> None:
        """Let the replica call one of its methods. If it is dead, nothing happens: `receive` will tell."""
        with self._whole(), suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send((method, args))

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
                self._hangs = f"hangs: no sign of life for {limit:g} s {hint}"
                self._process.kill()
                return

    def reason(self) -> str:
        """Return why the process has ended, or is about to."""
        if self._hangs is not None:
            return self._hangs
        if self.failure is not None:
            return f"died: {self.failure.told}"
        self._process.join(1)
        return f"died: it ended with exit code {self._process.exitcode} and left no error{hint_of(self._process)}"

    def kill(self) -> None:
        """End the process now."""
        self._process.kill()

    def join(self, seconds: float) -> None:
        """Wait for the process to end, and kill it if it does not; give its pipes back."""
        self._process.join(seconds)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(1)  # a driver may hold it for longer
        if self._watcher.ident is not None and self._watcher is not threading.current_thread():
            self._watcher.join()
        self.pipe.close()
        self._beats.close()


def gpus_of(config: Config, index: int) -> str | None:
    """Return the GPUs of a replica as CUDA_VISIBLE_DEVICES names them; None: it needs none."""
    if config.device == "cpu":
        return None
    visible = os.environ.get(VISIBLE)
    names = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
    ranks = config.tensor_parallel_size
    return ",".join(name.strip() for name in names[index * ranks : (index + 1) * ranks])
