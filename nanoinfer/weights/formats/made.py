"""Made: what a CPU makes of a stored matrix once, since it multiplies numbers of the model's dtype the fastest."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import TypeVar, cast

import torch
from torch import Tensor

from nanoinfer.process.host_memory import free_bytes, total_bytes

T = TypeVar("T")

log = logging.getLogger("nanoinfer")

LEAST_FREE = 1 / 4  # of the host's memory stays free


class Made:
    """Keeps what was made of some tensors until these change."""

    def __init__(self) -> None:
        self._made: object = None
        self._versions: list[int] = []

    def of(self, tensors: Iterable[Tensor | None], make: Callable[[], T]) -> T:
        """Return what `make` makes of the tensors, and make it anew only once they have changed.

        Tensors that were made in inference mode do not tell whether they have: of these it is made each time.
        """
        own = [tensor for tensor in tensors if tensor is not None]
        if any(tensor.is_inference() for tensor in own):
            return make()
        versions = [tensor._version for tensor in own]  # how often each was written
        if self._versions != versions:
            self._made = None  # first, as both may not fit
            self._made, self._versions = make(), versions
        return cast(T, self._made)


def may_keep(shape: torch.Size | tuple[int, int], dtype: torch.dtype) -> bool:
    """Whether the host has room for a matrix in another dtype, which stays beside the stored one."""
    keeps = _has_room(shape[0] * shape[1] * dtype.itemsize)
    _tell(dtype, keeps)
    return keeps


def may_keep_bits(shape: torch.Size | tuple[int, int], size: float) -> bool:
    """Whether the host has room for a matrix in another order of its bits, too. size: a number's bytes"""
    keeps = _has_room(shape[0] * shape[1] * size)
    if keeps:
        _tell_of_bits(size)
    return keeps


def _has_room(needed: float) -> bool:
    return free_bytes() - needed > LEAST_FREE * total_bytes()


@functools.cache
def _tell_of_bits(size: float) -> None:
    log.info("the CPU keeps weights of few bits in the order of its product of few rows, too: %.2f bytes more", size)


@functools.cache
def _tell(dtype: torch.dtype, keeps: bool) -> None:
    name = str(dtype).removeprefix("torch.")
    if keeps:
        message = (
            "the CPU keeps weights of few bits in %s, too, which it multiplies the fastest: %d bytes more for each"
        )
        log.info(message, name, dtype.itemsize)
    else:
        log.warning(
            "memory is too short to keep weights of few bits in %s, too: products take up to 3 times as long", name
        )
