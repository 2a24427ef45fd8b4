"""What is kept in host memory of images, for those that come again."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Generic, Protocol, TypeVar


class HasBytes(Protocol):
    """Something that takes memory."""

    @property
    def num_bytes(self) -> int:
        """How much memory it takes."""
        ...


T = TypeVar("T", bound=HasBytes)


class Kept(Generic[T]):
    """Things by the keys of their images, from any thread; the least recently used goes first.

    most_bytes: never more are kept; num_bytes: so many are
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.num_bytes = 0
        self._things: OrderedDict[bytes, T] = OrderedDict()  # the most recently used last
        self._lock = Lock()

    def __contains__(self, key: bytes) -> bool:
        """Whether something is kept of an image; that is no use of it."""
        with self._lock:
            return key in self._things

    def find(self, key: bytes) -> T | None:
        """Return what is kept of an image; None: nothing."""
        with self._lock:
            if key in self._things:
                self._things.move_to_end(key)
            return self._things.get(key)

    def keep(self, key: bytes, thing: T) -> None:
        """Keep a thing in place of the image's last. What alone is too large is not kept."""
        with self._lock:
            self._drop(key)
            if thing.num_bytes > self.most_bytes:
                return
            while self.num_bytes + thing.num_bytes > self.most_bytes:
                self._drop(next(iter(self._things)))
            self._things[key] = thing
            self.num_bytes += thing.num_bytes

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._things.clear()
            self.num_bytes = 0

    def _drop(self, key: bytes) -> None:
        if (thing := self._things.pop(key, None)) is not None:
            self.num_bytes -= thing.num_bytes
