"""patience: a limit to how long one rank waits for the others."""

from __future__ import annotations

import time
from collections.abc import Callable

from nanoinfer.parallel.channel import BEAT_SECONDS


def patience(seconds: float, late: Callable[[], Exception]) -> Callable[[], None]:
    """Return a check to repeat while waiting. After so many seconds it raises what `late` returns."""
    waited, last = 0.0, time.monotonic()

    def check() -> None:
        nonlocal waited, last
        now = time.monotonic()
        waited += min(now - last, BEAT_SECONDS)  # a longer gap was a Ctrl-Z, not a wait
        last = now
        if waited > seconds:
            raise late()

    return check
