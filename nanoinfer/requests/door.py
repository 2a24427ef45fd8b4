"""Door: what the methods of an LLM do before their own work, in whichever room they are."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal

from nanoinfer.engine.client import EngineClient
from nanoinfer.requests.requests import Requests

State = Literal["open", "ready", "writable"]


class Door:
    """A base of LLM: its engine client, its requests, and the turn of a thread that calls."""

    engine: EngineClient
    _requests: Requests
    _busy: threading.Lock

    def _door(self, state: State) -> AbstractContextManager[None]:
        """Return the context in which a method checks its arguments: an error there ends the calls of all peers.

        state: what the engine must be. "ready": it is awake and has all weights; "writable": no weights are offloaded

        Raises as the engine's check_open, check_ready or check_writable does.
        """
        checks: dict[State, Callable[[], None]] = {
            "open": self.engine.check_open,
            "ready": self.engine.check_ready,
            "writable": self.engine.check_writable,
        }
        checks[state]()
        return self.engine.consistent()

    def _turn(self, alone: bool = False) -> threading.Lock:
        """Return the lock that a caller holds while the engine runs. Raises RuntimeError if it is taken.

        alone: raise it too while requests of add_request have not ended

        The caller writes `with` itself: only a lock's own `with` releases it wherever an interrupt falls.
        """
        if self._busy.locked():
            raise RuntimeError(
                "another thread is generating with this LLM or writes its weights, or a stream is open: pass all"
                " prompts in one call, or close the stream"
            )
        if alone:
            self._requests.settle()
            if self._requests.are_left:
                raise RuntimeError("requests of add_request have not ended: call step until they have, or abort them")
        return self._busy
