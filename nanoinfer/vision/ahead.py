"""Makes the pixels of images in threads, ahead of the steps that want them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from threading import Barrier

import torch
from torch import Tensor

from nanoinfer.vision.pixels import Pixels, bytes_of

MOST_THREADS = 16  # an H100 encodes up to 200 images of a megapixel a second, and a thread prepares 50


class PixelsAhead:
    """Holds the pixels that were asked for in time. Threads start with the first image.

    dtype: the tower's, in which pixels are half as large; is_pinned: they are to be copied to a GPU
    """

    def __init__(self, dtype: torch.dtype, is_pinned: bool) -> None:
        self._dtype, self._is_pinned = dtype, is_pinned
        self._made: dict[bytes, Future[Pixels]] = {}

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return make_pool()

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

    def take_made(self, most_bytes: int) -> dict[bytes, Pixels]:
        """Return pixels that are made by now, at most so many bytes or one image's, and hold them no longer."""
        taken: dict[bytes, Pixels] = {}
        for key, future in list(self._made.items()):
            if not future.done() or future.exception() is not None:  # an error comes with the step that wants these
                continue
            most_bytes -= bytes_of(future.result())
            if taken and most_bytes < 0:
                break
            taken[key] = self._made.pop(key).result()
        return taken

    def _begin(self, wanted: Mapping[bytes, Pixels]) -> None:
        for key, pixels in wanted.items():
            if key not in self._made:
                self._made[key] = self._pool.submit(self._make, pixels)

    def _make(self, pixels: Pixels) -> Pixels:
        return {name: self._ready(tensor) for name, tensor in pixels.items()}

    def _ready(self, tensor: Tensor) -> Tensor:
        tensor = tensor.to(self._dtype) if tensor.is_floating_point() else tensor
        return tensor.pin_memory() if self._is_pinned else tensor


def _result(future: Future[Pixels]) -> Pixels | ValueError:
    try:
        return future.result()
    except ValueError as error:
        return error


def make_pool() -> ThreadPoolExecutor:
    """Start threads, in each of which torch computes with one thread: there is an image for each."""
    count = min(MOST_THREADS, os.cpu_count() or 1)
    started = Barrier(count + 1)
    pool = ThreadPoolExecutor(count, "nanoinfer-images", torch.set_num_threads, (1,))
    for _ in range(count):
        pool.submit(started.wait)
    started.wait()
    torch.set_num_threads(torch.get_num_threads())  # what a thread sets is the default of those that start later
    return pool
