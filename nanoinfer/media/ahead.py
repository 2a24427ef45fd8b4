"""Makes the pixels of images in threads, ahead of the steps that want them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Barrier
from typing import ParamSpec, TypeVar

import torch

from nanoinfer.media.pixels import Pixels, PixelsOnDemand, count_values

# An H100 encodes 110 images of a megapixel a second. More threads would take the interpreter from the engine's, which
# wants it again after each operation that it launches: 256 images took 5.9 s with these, and 6.3 s with 16 that open.
OPEN_THREADS, AHEAD_THREADS = 3, 6

P = ParamSpec("P")
T = TypeVar("T")


class MediaThreads:
    """Threads for tasks with images. They start with the first task, and again in a fork, which has none of them."""

    def __init__(self, most: int = OPEN_THREADS) -> None:
        self._most = most
        self._pool: ThreadPoolExecutor | None = None
        self._owner = 0  # the process that they are in

    def submit(self, task: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Let a thread do a task."""
        if self._pool is None or self._owner != os.getpid():
            self._pool, self._owner = make_pool(self._most), os.getpid()
        return self._pool.submit(task, *args, **kwargs)

    def close(self) -> None:
        """Cancel the tasks that no thread has begun; no further one may come."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


class PixelsAhead:
    """Holds the pixels that were asked for in time. Threads start with the first image.

    is_pinned: they are to be copied to a GPU
    """

    def __init__(self, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        self._threads = MediaThreads(AHEAD_THREADS)
        self._made: dict[bytes, Future[Pixels]] = {}

    def look(self, wanted: Mapping[bytes, Pixels]) -> None:
        """Begin to make the pixels of images, by their keys, and drop those of others."""
        for key in self._made.keys() - wanted.keys():
            self._made.pop(key).cancel()
        self._begin(wanted)

    def take(self, wanted: Mapping[bytes, Pixels]) -> dict[bytes, Pixels | ValueError]:
        """Return the pixels of images, and hold them no longer; an error is in place of those that cannot be made."""
        self._begin(wanted)
        taken = {key: self._made.pop(key) for key in wanted}
        return {key: _result(future) for key, future in taken.items()}

    def take_made(self, most_values: int) -> dict[bytes, Pixels]:
        """Return pixels that are made by now, at most so many values or one image's, and hold them no longer."""
        taken: dict[bytes, Pixels] = {}
        for key, future in list(self._made.items()):
            if not future.done() or future.exception() is not None:  # an error comes with the step that wants these
                continue
            most_values -= count_values(future.result())
            if taken and most_values < 0:
                break
            taken[key] = self._made.pop(key).result()
        return taken

    def _begin(self, wanted: Mapping[bytes, Pixels]) -> None:
        for key, pixels in wanted.items():
            if key not in self._made:
                self._made[key] = self._threads.submit(self._make, pixels)

    def _make(self, pixels: Pixels) -> Pixels:
        made = pixels.in_bytes() if isinstance(pixels, PixelsOnDemand) else pixels
        return {name: tensor.pin_memory() for name, tensor in made.items()} if self._is_pinned else made


def _result(future: Future[Pixels]) -> Pixels | ValueError:
    try:
        return future.result()
    except ValueError as error:
        return error


def make_pool(most: int) -> ThreadPoolExecutor:
    """Start threads, in each of which torch computes with one thread: there is an image for each."""
    count = min(most, os.cpu_count() or 1)
    started = Barrier(count + 1)
    pool = ThreadPoolExecutor(count, "nanoinfer-media", torch.set_num_threads, (1,))
    for _ in range(count):
        pool.submit(started.wait)
    started.wait()
    torch.set_num_threads(torch.get_num_threads())  # what a thread sets is the default of those that start later
    return pool
