"""Makes the pixels of images in threads, ahead of the steps that want them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from threading import Barrier

import torch

from nanoinfer.vision.pixels import Pixels, PixelsOnDemand, count_values

MOST_THREADS = 16
# An H100 encodes 110 images of a megapixel a second, which six threads prepare. More would take the interpreter from
# the engine's thread, which wants it again after each operation that it launches.
AHEAD_THREADS = 6


class PixelsAhead:
    """Holds the pixels that were asked for in time. Threads start with the first image.

    is_pinned: they are to be copied to a GPU
    """

    def __init__(self, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        self._made: dict[bytes, Future[Pixels]] = {}

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return make_pool(AHEAD_THREADS)

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
                self._made[key] = self._pool.submit(self._make, pixels)

    def _make(self, pixels: Pixels) -> Pixels:
        made = pixels.in_bytes() if isinstance(pixels, PixelsOnDemand) else pixels
        return {name: tensor.pin_memory() for name, tensor in made.items()} if self._is_pinned else made


def _result(future: Future[Pixels]) -> Pixels | ValueError:
    try:
        return future.result()
    except ValueError as error:
        return error


def make_pool(most: int = MOST_THREADS) -> ThreadPoolExecutor:
    """Start threads, in each of which torch computes with one thread: there is an image for each."""
    count = min(most, os.cpu_count() or 1)
    started = Barrier(count + 1)
    pool = ThreadPoolExecutor(count, "nanoinfer-images", torch.set_num_threads, (1,))
    for _ in range(count):
        pool.submit(started.wait)
    started.wait()
    torch.set_num_threads(torch.get_num_threads())  # what a thread sets is the default of those that start later
    return pool
