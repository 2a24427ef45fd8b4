"""How many of the CPU's threads a step takes: torch's threads wait for each other in every operation."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

GAIN = 1.15  # twice the threads must be faster by this: where a core has other work, they are far slower
SECONDS = 0.2  # to time one number of threads
STEPS = 7


def choose_threads(step: Callable[[], object]) -> int:
    """Time the step with torch's number of threads, a half of it, a quarter, ..., and return the best.

    A busy core shows here: a step waits for the thread that shares it. Stops where fewer threads are slower.
    """
    count = torch.get_num_threads()
    seconds = _seconds(step, count)
    while count > 1:
        fewer = count // 2
        fewer_seconds = _seconds(step, fewer)
        if fewer_seconds > seconds * GAIN:
            break
        count, seconds = fewer, min(seconds, fewer_seconds)
    return count


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
    seconds: list[float] = []
    with num_threads(count):
        while len(seconds) < STEPS and sum(seconds) < SECONDS:
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
