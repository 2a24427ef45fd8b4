"""Holds a Ctrl-C back while it must not come."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType

AGAIN_SECONDS = 1.0  # a SIGINT that comes sooner is the same key press: some launchers repeat the terminal's


@contextmanager
def delayed_interrupt() -> Iterator[Collection[object]]:
    """Let a SIGINT that comes inside the block take effect at the block's end; a second one takes effect at once.

    The process's own handler gets the signal. Python calls it on the main thread: on others this block does nothing.
    Yields what is empty until a SIGINT has come.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield ()
        return
    delayed: list[tuple[float, FrameType | None]] = []  # at most one: its time, and the frame that it interrupted

    def delay(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not delayed:
            delayed.append((now, frame))
        elif now - delayed[0][0] > AGAIN_SECONDS:
            delayed.clear()
            handler(number, frame)

    signal.signal(signal.SIGINT, delay)
    try:
        yield delayed
    finally:
        signal.signal(signal.SIGINT, handler)
        if delayed:
            handler(signal.SIGINT, delayed[0][1])


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Let a process that starts in the block get no Ctrl-C before it can ignore it."""
    resource_tracker.ensure_running()  # before: when it starts its own process, it lets all interrupts through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
