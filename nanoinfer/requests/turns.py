"""TakesTurns: what all methods of an LLM share, in whichever room they are."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

from nanoinfer.requests.interface import AnyEngine, SomeRequests


class TakesTurns(ABC):
    """A base of LLM: whoever computes, its requests, and the turn of a thread that calls."""

    engine: AnyEngine
    _requests: SomeRequests

    @abstractmethod
    def _turn(self, alone: bool = False) -> threading.Lock:
        """Return the lock that a caller holds while the engine runs. Raises RuntimeError if it is taken.

        alone: raise it too while requests of add_request have not ended
        """
