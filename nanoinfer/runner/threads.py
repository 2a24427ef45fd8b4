"""Threads: how many of the CPU's threads a step takes. In every operation they wait for each other."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

GAIN = 1.03  # by so much all threads must be faster than half of them: on a core with other work they are far slower
SECONDS = 0.2  # to time one number of threads
STEPS = 8


class Threads:
    """The number of threads for steps of few and of many tokens; until `choose` is called, torch's own number."""

    def __init__(self) -> None:
        self._choices: list[tuple[int, int]] = []  # tokens, and the threads of steps that compute at least so many

    def choose(self, tokens: int, step: Callable[[], object]) -> None:
        """Time a step with torch's number of threads, a half of it, a quarter, ...; keep the best for such steps.

        tokens: the fewest that a step of the choice computes; call with rising numbers

        Stops where fewer threads are slower. A core that is busy with other work shows here: the threads wait for it.
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
        """Inside, torch computes with the threads that suit a step of so many tokens."""
        count = next((count for least, count in reversed(self._choices) if least <= tokens), None)
        return nullcontext() if count is None else num_threads(count)


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Inside, torch computes with `count` threads."""
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
    """The median time of some steps; the first warms up, unless it takes long."""
    seconds: list[float] = []
    with num_threads(count):
        while len(seconds) < STEPS and sum(seconds) < SECONDS:
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:] or seconds)
