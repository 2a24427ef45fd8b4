"""Ranks and replicas of tests are forks of a server that has imported what they need: spawned ones import for seconds.

Scripts of tests spawn theirs in processes of their own, as users' scripts do, and so do tests of the start itself.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from nanoinfer.process.first_launch import prepare_own

IMPORTED = [
    "nanoinfer.runner.worker",
    "nanoinfer.replicas.replica",
    "transformers.modeling_utils",  # this one and those below are for towers, and take more than a second
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.processing_auto",
]
SERVERS = dict(os.environ)  # environment
CONTEXTS: dict[str, Any] = mp.context._concrete_contexts  # type: ignore[attr-defined]


def enter(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


class Forked(ForkServerProcess):
    """A process with the environment and the blocked signals of the one that starts it, not the server's."""

    def start(self) -> None:
        resource_tracker.ensure_running()  # before: its own start lets all signals through
        self.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until `run`, and in the server
        self.environment = dict(os.environ)
        try:
            enter(SERVERS)  # nor is the server for one GPU: a context there would be of no use to its forks
            forkserver.ensure_running()
            enter(self.environment)
            super().start()
        finally:
            enter(self.environment)
            signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)

    def run(self) -> None:
        enter(self.environment)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)
        prepare_own()
        super().run()


class Server(ForkServerContext):
    """A context of multiprocessing whose processes are forks."""

    Process = Forked


def fork_what_spawns() -> None:
    """Let whoever asks for multiprocessing's "spawn" get forks of a server, which starts with the first of them."""
    server = Server()
    server.set_forkserver_preload(IMPORTED)
    CONTEXTS["spawn"] = server


def wait_for_server() -> None:
    """Return when the server has imported what it forks."""
    process = mp.get_context("spawn").Process(target=int)
    process.start()
    process.join()


@contextmanager
def spawning() -> Iterator[None]:
    """Let processes be spawned inside the context after all."""
    before, CONTEXTS["spawn"] = CONTEXTS["spawn"], mp.context.SpawnContext()
    try:
        yield
    finally:
        CONTEXTS["spawn"] = before
