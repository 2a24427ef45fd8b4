"""Ctrl-C, where it must not come in the middle."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def delayed_interrupt() -> Iterator[None]:
    """Let a SIGINT that comes inside the block take effect at its end; a second one takes effect at once.

    Whatever handler the process has gets them. Python calls it on the main thread: on others this block does nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    delayed: list[FrameType | None] = []

    def delay(number: int, frame: FrameType | None) -> None:
        if delayed:
            handler(number, delayed.pop())
        delayed.append(frame)

    signal.signal(signal.SIGINT, delay)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if delayed:
            handler(signal.SIGINT, delayed.pop())
