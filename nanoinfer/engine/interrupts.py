"""Ctrl-C, where it must not come in the middle."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

AGAIN_SECONDS = 1.0  # what comes sooner is the same key press: some launchers pass on what the terminal has sent too


@contextmanager
def delayed_interrupt() -> Iterator[None]:
    """Let a SIGINT that comes inside the block take effect at its end; one that comes again takes effect at once.

    Whatever handler the process has gets it. Python calls it on the main thread: on others this block does nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    delayed: list[tuple[float, FrameType | None]] = []  # one at most: when and where it came

    def delay(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not delayed:
            delayed.append((now, frame))
        elif now - delayed[0][0] > AGAIN_SECONDS:
            delayed.clear()
            handler(number, frame)

    signal.signal(signal.SIGINT, delay)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if delayed:
            handler(signal.SIGINT, delayed[0][1])
