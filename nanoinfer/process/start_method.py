"""How this process starts others is its user's choice, which nothing here makes before the user."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def start_method_open() -> Iterator[None]:
    """A context in which processes start. multiprocessing settles its start method then, even for another context's.

    A method that was not settled before is not settled behind it, so that set_start_method still works.
    """
    is_settled = bool(mp.get_start_method(allow_none=True))
    try:
        yield
    finally:
        if not is_settled:
            mp.set_start_method(None, force=True)
