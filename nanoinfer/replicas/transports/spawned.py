"""Spawned replicas: processes of this machine, each with a pipe."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import sys
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection
from typing import Any

import torch

from nanoinfer.config import Config
from nanoinfer.engine.ranks.workers import hint_of
from nanoinfer.parallel.buckets import SharedSegment
from nanoinfer.process.first_launch import VISIBLE, started_for
from nanoinfer.process.interrupts import interrupts_blocked
from nanoinfer.process.start_method import start_method_open
from nanoinfer.replicas.replica import run_replica
from nanoinfer.replicas.transports.process import Mirrors, ReplicaProcess, Transport


def run_spawned(pipe: Connection, beats: Connection) -> None:
    """Live as one replica in a process of its own, which ends when its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the LLM's process gets the Ctrl-C, and drops the requests
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked until now, see interrupts_blocked
    parent = mp.parent_process()
    assert parent is not None
    run_replica(pipe, beats, [parent.sentinel])


class SpawnedProcess(ReplicaProcess):
    """A replica in a process that this one starts."""

    def __init__(self, config: Config, index: int) -> None:
        super().__init__(config, index)
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._beats, beats = context.Pipe(duplex=False)
        self._process: Any = context.Process(
            target=run_spawned, args=(theirs, beats), name=f"nanoinfer-replica-{index}"
        )
        with started_for(config.device_of(0), gpus_of(config, index)), start_method_open(), interrupts_blocked():
            self._process.start()
        mp.process._children.discard(self._process)  # type: ignore[attr-defined]  # or exit would wait for it
        theirs.close()
        beats.close()

    @property
    def pid(self) -> int:
        """The process's number."""
        return int(self._process.pid)

    def _last_words(self) -> str:
        self._process.join(1)
        return f"it ended with exit code {self._process.exitcode} and left no error{hint_of(self._process)}"

    def kill(self) -> None:
        """End the process now."""
        self._process.kill()

    def _join(self, seconds: float) -> None:
        self._process.join(seconds)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(1)  # a driver may hold it for longer


class Spawning(Transport):
    """Spawns replicas, which share this machine's memory."""

    def __init__(self) -> None:
        self._files: list[int] = []  # which have no names: the system frees them with the last process that has them

    def layer_files(self, config: Config) -> tuple[str, ...]:
        """Return files that live until `close`, or until this process and all replicas are gone."""
        if config.weight_offload_gib and config.data_parallel_size > 1 and sys.platform == "linux":
            self._files += [os.memfd_create("nanoinfer-layers") for _ in range(config.tensor_parallel_size)]
        return tuple(f"/proc/{os.getpid()}/fd/{file}" for file in self._files)

    def close(self) -> None:
        """Give the files back."""
        while self._files:
            os.close(self._files.pop())

    def start(self, config: Config, index: int) -> ReplicaProcess:
        """Start a replica, which imports what it needs and waits for `begin`. Of config, the options are enough."""
        return SpawnedProcess(config, index)

    def mirrored(self, segment: SharedSegment, processes: dict[int, ReplicaProcess]) -> AbstractContextManager[Mirrors]:
        """Return a context in which these replicas have a segment, too: it is the same memory."""
        return nullcontext(Mirrors(dict.fromkeys(processes, segment), lambda: None))


def gpus_of(config: Config, index: int) -> str | None:
    """Return the GPUs of a replica as CUDA_VISIBLE_DEVICES names them; None: it needs none."""
    if config.device == "cpu":
        return None
    visible = os.environ.get(VISIBLE)
    names = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
    ranks = config.tensor_parallel_size
    return ",".join(name.strip() for name in names[index * ranks : (index + 1) * ranks])
