"""Holds a Ctrl-C back while it must not come."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType

AGAIN_SECONDS = 1.0  # a SIGINT that comes sooner is the same key press: some launchers repeat the terminal's


@contextmanager
def delayed_interrupt() -> Iterator[Collection[object]]:
    """Let a SIGINT that comes inside the block take effect at the block's end; a second one takes effect at once.

    The process's own handler gets the signal. Python calls it on the main thread: on others this block does nothing,
    nor does one inside another one. Yields what is empty until a SIGINT has come for this block.
    """
    handler = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not callable(handler) or isinstance(handler, Delay) or not is_main:
        yield ()
        return
    delay = Delay(handler)
    signal.signal(signal.SIGINT, delay)
    try:
        yield delay.delayed
    finally:
        signal.signal(signal.SIGINT, handler)
        if delay.delayed:
            handler(signal.SIGINT, delay.delayed[0][1])


class Delay:
    """A handler of SIGINT that keeps the first one, and gives the second one to the handler before.

    delayed: at most one: its time, and the frame that it interrupted
    """

    def __init__(self, handler: Callable[[int, FrameType | None], object]) -> None:
        self.delayed: list[tuple[float, FrameType | None]] = []
        self._handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        now = time.monotonic()
        if not self.delayed:
            self.delayed.append((now, frame))
        elif now - self.delayed[0][0] > AGAIN_SECONDS:
            self.delayed.clear()
            self._handler(number, frame)


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Let a process that starts in the block get no Ctrl-C before it can ignore it."""
    resource_tracker.ensure_running()  # before: when it starts its own process, it lets all interrupts through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
