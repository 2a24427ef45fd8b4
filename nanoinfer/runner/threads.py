"""Threads: how many of the CPU's threads a step takes. In every operation the threads wait for each other."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

GAIN = 1.03  # twice the threads must be so many times faster: if a core gets other work, they are far slower
SECONDS = 0.2  # to time one number of threads
STEPS = 8  # at most, to time one number of threads


class Threads:
    """Chooses how many threads steps of few and of many tokens take; until `choose` is called, torch's own number."""

    def __init__(self) -> None:
        self._choices: list[tuple[int, int]] = []  # tokens, and the threads of steps that compute at least so many

    def choose(self, tokens: int, step: Callable[[], object]) -> None:
        """Time a step with torch's number of threads, a half of it, a quarter, ...; keep the best for such steps.

        tokens: the choice is for steps of at least so many tokens; call with rising numbers
        step: runs such a step

        The search ends where fewer threads are slower. If other work keeps a core busy, the other threads wait for it.
        """
        best = torch.get_num_threads()
        seconds = _seconds(step, best)
        while best > 1:
            fewer_seconds = _seconds(step, best // 2)
            if fewer_seconds > seconds * GAIN:
                break
            best, seconds = best // 2, min(seconds, fewer_seconds)
        self._choices.append((tokens, best))

    def of(self, tokens: int) -> AbstractContextManager[None]:
        """Return a context in which torch computes with the threads that suit a step of so many tokens."""
        count = next((count for least, count in reversed(self._choices) if least <= tokens), None)
        return nullcontext() if count is None else num_threads(count)


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Let torch compute with `count` threads inside the context."""
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _seconds(step: Callable[[], object], count: int) -> float:
    """Return the median time of some steps; the first only warms up, unless it takes all the time."""
    seconds: list[float] = []
    with num_threads(count):
        while len(seconds) < STEPS and sum(seconds) < SECONDS:
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:] or seconds)
