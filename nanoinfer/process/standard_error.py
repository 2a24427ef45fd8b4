"""Standard error, where a command says how far it is. Its work goes on where nobody can hear that."""

from __future__ import annotations

import shutil
import sys
from contextlib import suppress
from typing import Any


def is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal; programs put all kinds of objects in the place of standard error."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # it is None, or can only be written to, or is closed
        return False


def say(text: object, end: str = "\n") -> None:
    """Print a text, or nothing where standard error is closed, or its disk is full."""
    if sys.stderr is not None:  # else print would take standard output, which may have a command's results
        with suppress(OSError, ValueError):
            print(text, end=end, file=sys.stderr, flush=True)


def replace_line(text: str) -> None:
    """Print a text in the place of the terminal's line; what would wrap is cut off, for it could not be replaced."""
    say(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}", end="")
