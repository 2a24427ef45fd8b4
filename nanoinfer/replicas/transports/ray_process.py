"""Replicas in Ray actors: Ray places and keeps their processes, and its object store brings them tensors."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch

from nanoinfer.config import Config
from nanoinfer.parallel.buckets import SharedSegment
from nanoinfer.parallel.ray_cluster import connected, describe_room, share_of_replica
from nanoinfer.replicas.messages import Failed, Message, Placed
from nanoinfer.replicas.transports.process import Mirrors, ReplicaProcess, Transport
from nanoinfer.replicas.transports.ray_actor import MEMORY, ReplicaActor
from nanoinfer.replicas.transports.tcp import Listener, shut

TOLD_SECONDS = 10  # who waits longer for a place says so
DEATH_SECONDS = 5  # Ray needs some to find out why an actor has died

log = logging.getLogger("nanoinfer")


class RayProcess(ReplicaProcess):
    """A replica in a Ray actor. A thread waits until Ray has placed it and it has connected.

    actor: Ray's handle
    """

    _beats: Connection | None = None

    def __init__(self, config: Config, index: int) -> None:
        super().__init__(config, index)
        self._ray: Any = connected()
        self._index = index
        self._asked = share_of_replica(config.device, config.tensor_parallel_size, config.data_parallel_size)
        self._placement_timeout = config.placement_timeout
        self._config: Config | None = None  # what `begin` was given
        self._pid = 0
        self._life: Any = None  # what Ray promises of `live`
        self._came: tuple[Connection, Connection] | None = None
        actor = self._ray.remote(concurrency_groups={MEMORY: 1})(ReplicaActor)
        self.actor = actor.options(max_restarts=0, **self._asked).remote()
        self.pipe, self._told = Pipe()  # until the replica's own pipe is there, the thread tells here
        threading.Thread(target=self._connect, name=f"nanoinfer-placement-{index}", daemon=True).start()

    def _connect(self) -> None:
        try:
            message = self._placed()
        except Exception as error:
            message = Failed(None, words_of(error))
        with suppress(OSError):  # the LLM is closed
            self._told.send(message)

    def _placed(self) -> Message:
        """Wait until the replica has a place and has connected."""
        pid = self.actor.pid.remote()
        if not self._is_there(pid, min(TOLD_SECONDS, self._placement_timeout)):
            log.warning("replica %d is not there yet: %s", self._index, describe_room(self._asked))
        if not self._is_there(pid, self._placement_timeout - TOLD_SECONDS):
            self._problem = (
                f"was not placed within {self._placement_timeout:g} s (placement_timeout): {describe_room(self._asked)}"
            )
            return Failed(None, self._problem)
        self._pid = self._ray.get(pid)
        with Listener(self._ray.util.get_node_ip_address()) as listener:
            self._life = self.actor.live.remote(listener.address, listener.key)
            self._came = listener.accept(self._check_life), listener.accept(self._check_life)
        return Placed()

    def _is_there(self, promised: Any, seconds: float) -> bool:
        timeout = None if math.isinf(seconds) else max(seconds, 0)
        return bool(self._ray.wait([promised], timeout=timeout)[0])

    def _check_life(self) -> None:
        """Raise Ray's error if the actor has died."""
        if self._ray.wait([self._life], timeout=0)[0]:
            self._ray.get(self._life)

    def begin(self, config: Config) -> None:
        """Let the replica start its engine, when it has a place."""
        self._config = config
        if self._beats is not None:
            super().begin(config)

    def receive(self) -> Message | None:
        """Return what the replica has sent, for which the pipe is ready; None: it is dead."""
        message = super().receive()
        if isinstance(message, Placed):
            assert self._came is not None
            self.pipe.close()
            self._told.close()
            self.pipe, self._beats = self._came
            if self._config is not None:
                super().begin(self._config)
        return message

    @property
    def pid(self) -> int:
        """The process's number on its machine; 0: it has no place yet."""
        return self._pid

    def _last_words(self) -> str:
        if not self._ray.is_initialized():  # `get` would start a cluster
            return "Ray has been shut down"
        try:
            self._ray.get(self._life, timeout=DEATH_SECONDS)
        except Exception as error:
            return words_of(error)
        return "it ended and left no error"

    def kill(self) -> None:
        """End the process now, or let Ray place it no more."""
        with suppress(Exception):  # Ray is shut down
            if self._ray.is_initialized():
                self._ray.kill(self.actor)
        for connection in (self.pipe, self._beats):  # a machine that is gone closes none
            if connection is not None:
                shut(connection)

    def _join(self, seconds: float) -> None:
        with suppress(Exception):
            if self._life is not None and self._ray.is_initialized():
                self._ray.wait([self._life], timeout=seconds)
        self.kill()


class OnRay(Transport):
    """Starts replicas as actors of the cluster."""

    def start(self, config: Config, index: int) -> ReplicaProcess:
        """Ask Ray for an actor, which waits for `begin`. Of config, the options are enough."""
        return RayProcess(config, index)

    @contextmanager
    def mirrored(self, segment: SharedSegment, processes: dict[int, ReplicaProcess]) -> Iterator[Mirrors]:
        """Return a context in which these replicas have a segment on their machines, which Ray's object store fills."""
        ray: Any = connected()
        actors = {index: process.actor for index, process in processes.items() if isinstance(process, RayProcess)}

        def call(method: str, *args: Any) -> dict[int, Any]:
            """Let all actors call a method; returns what those return that live."""
            answers, found = {index: in_group(actor, method).remote(*args) for index, actor in actors.items()}, {}
            for index, answer in answers.items():
                with suppress(ray.exceptions.RayActorError):  # the pipe tells of it
                    found[index] = ray.get(answer)
            return found

        def copy() -> None:
            with segment.map(torch.device("cpu")) as memory:
                call("fill_segment", ray.put(memory.numpy()))

        try:
            yield Mirrors(dict.fromkeys(processes, segment) | call("open_segment", segment.size), copy)
        finally:
            call("close_segment")


def in_group(actor: Any, method: str) -> Any:
    """Return a method of the actor's group MEMORY."""
    return getattr(actor, method).options(concurrency_group=MEMORY)


def words_of(error: Exception) -> str:
    """Return the line of an error of Ray's that says the most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith("The actor ")]
    return (telling or lines or [type(error).__name__])[-1].partition(" Some common causes")[0]
