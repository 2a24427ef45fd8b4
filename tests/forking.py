"""Ranks and replicas of tests are forks of a server that has imported what they need: spawned ones import for seconds.

Scripts that tests run in a process of their own spawn theirs, as users' scripts do.
"""

from __future__ import annotations

import multiprocessing as mp
import os
from collections.abc import Callable
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

IMPORTED = ["transformers", "nanoinfer.runner.worker", "nanoinfer.replicas.replica"]


class Server(ForkServerContext):
    """A context of multiprocessing whose processes have this one's environment, not the server's."""

    def Process(  # noqa: N802 the name is multiprocessing's
        self, target: Callable[..., None], args: tuple[Any, ...], **options: Any
    ) -> ForkServerProcess:
        return ForkServerProcess(target=_run, args=(dict(os.environ), target, args), **options)


def fork_what_spawns() -> None:
    """Let whoever asks for multiprocessing's "spawn" get forks of a server, which starts with the first of them."""
    server = Server()
    server.set_forkserver_preload(IMPORTED)
    mp.context._concrete_contexts["spawn"] = server  # type: ignore[attr-defined]


def _run(environment: dict[str, str], target: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    target(*args)
