"""Interrupts: Ctrl-C ends a job between two steps, not in the middle of a line."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

AGAIN_SECONDS = 1.0  # a SIGINT that comes sooner is the same key press: some launchers repeat the terminal's


class Interrupts:
    """Inside `with interrupts:`, a first Ctrl-C is only noted; a second one, or one while the job waits, raises.

    asked: somebody pressed Ctrl-C
    waits: the job waits for its input, and has nothing else to do
    """

    def __init__(self) -> None:
        self.asked = False
        self.waits = False
        self._asked_at = 0.0
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():  # on others, Python calls no handler
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.waits or (self.asked and now - self._asked_at > AGAIN_SECONDS):
            raise KeyboardInterrupt
        if not self.asked:
            self.asked, self._asked_at = True, now
