"""Variables of this process's environment that are others for a while: what starts meanwhile reads them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()  # held while variables are others


@contextmanager
def changed_environment(variables: dict[str, str]) -> Iterator[None]:
    """Set variables in the block; behind it they are as before. Blocks of several threads run one after another."""
    with _lock:
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
