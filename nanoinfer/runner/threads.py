"""Threads: how many of the CPU's threads a step takes. In every operation the threads wait for each other."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

GAIN = 1.03  # with twice the threads, a step must be this many times faster: beside other work it is far slower
SECONDS = 0.2  # to time one number of threads
STEPS = 8  # at most, to time one number of threads
SLOW = 1.5  # times the usual seconds: what steps take beyond that adds up
EXCESS = 2.0  # times the usual seconds: so much of it shows that the threads wait for other work
PAUSES = 1.0, 64.0  # seconds with fewer threads, at first and at most: each pause is twice the one before


class Threads:
    """Chooses how many threads steps of few and of many tokens take; until it is told how, torch's own number.

    As a string it is the number for steps of many tokens.
    """

    def __init__(self) -> None:
        self._choices: list[tuple[int, int]] = []  # tokens, and the threads of steps that compute at least so many
        self._contention = Contention()
        self._fixed: int | None = None

    def fix(self, count: int) -> None:
        """Let every step take so many threads, whatever its time."""
        self._fixed = count

    def take_all(self) -> None:
        """Let steps take torch's number of threads, or fewer while other work keeps a core busy."""
        self._choices.append((0, torch.get_num_threads()))

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

    def __str__(self) -> str:
        count = self._fixed or (self._choices[-1][1] if self._choices else torch.get_num_threads())
        return f"{count} thread{'s' if count > 1 else ''}"

    @contextmanager
    def of(self, tokens: int) -> Iterator[None]:
        """Let torch compute with the threads that suit a step of so many tokens, which runs inside the context."""
        start = time.perf_counter()
        count = self._count(tokens, start)
        with num_threads(count):
            yield
        if self._fixed is None and self._choices and count > 1:
            self._contention.judge(tokens, start, time.perf_counter())

    @contextmanager
    def of_rest(self, tokens: int) -> Iterator[None]:
        """Do as `of` does for what is left of a step. Its seconds are not a step's, and change no later choice."""
        with num_threads(self._count(tokens, time.perf_counter())):
            yield

    def _count(self, tokens: int, now: float) -> int:
        """Return how many threads suit a step of so many tokens."""
        if self._fixed is not None:
            return self._fixed
        chosen = next((count for least, count in reversed(self._choices) if least <= tokens), None)
        if chosen is None:
            return torch.get_num_threads()
        return max(1, chosen >> self._contention.halvings(now))


class Contention:
    """Halves the threads for a while when other work keeps a core busy: then steps take many times as long."""

    def __init__(self) -> None:
        self._usual: dict[int, float] = {}  # seconds of a step, by the bit length of its number of tokens
        self._excess = 0.0
        self._halvings = 0
        self._until = 0.0  # a time by the caller's clock
        self._pause = PAUSES[0]

    def halvings(self, now: float) -> int:
        """Return how often to halve the chosen threads; now: seconds, of any clock."""
        if now >= self._until:
            self._halvings = 0
        return self._halvings

    def judge(self, tokens: int, start: float, end: float) -> None:
        """Compare a step of so many tokens with the usual time of such steps, by a cumulative sum (Page, 1954)."""
        size, seconds = tokens.bit_length(), max(end - start, 1e-9)  # a clock may stand still
        usual = self._usual.get(size, seconds)
        self._usual[size] = usual + (min(seconds, usual * SLOW) - usual) / 8
        self._excess = max(0.0, self._excess + seconds / usual - SLOW)
        if self._excess > EXCESS:
            self._excess = 0.0
            self._halvings += 1
            self._until = end + self._pause
            self._pause = min(2 * self._pause, PAUSES[1])
        elif end > self._until + self._pause:
            self._pause = PAUSES[0]


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
