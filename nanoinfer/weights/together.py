"""Parts of parameters that are alike, and so are written together: a launch then does the work of many."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Protocol, TypeGuard, TypeVar

import torch
from torch import Tensor

from nanoinfer.weights.shards import Filled

BYTES_TOGETHER = 8 << 20  # of tensors that are written together: larger ones keep a GPU busy by themselves

T = TypeVar("T")


class Together(Filled, Protocol):
    """What can be written together with others of its class."""

    @property
    def likeness(self) -> Hashable:
        """What is equal for those that can be written together; None: it is written by itself."""
        ...

    @staticmethod
    def copy_all(parts: Sequence[T], stored: Tensor) -> None:
        """Write several; stored: [parts, ...], what fills each of them"""
        ...


def write_all(written: Iterable[tuple[Filled, Tensor]]) -> None:
    """Write targets, each with what fills it; of two that write the same place, any may come later."""
    kinds: dict[Hashable, list[tuple[Filled, Tensor]]] = {}
    for number, (target, source) in enumerate(written):
        likeness = target.likeness if is_together(target) else None
        kind: Hashable = number if likeness is None else (type(target), likeness, source.shape, source.dtype)
        kinds.setdefault(kind, []).append((target, source))
    for alike in kinds.values():
        for some in _cut(alike):
            targets, sources = zip(*some, strict=True)
            if len(some) > 1 and is_together(targets[0]):
                targets[0].copy_all(targets, torch.stack(sources))
            else:
                targets[0].copy_(sources[0])


def is_together(target: object) -> TypeGuard[Together]:
    """Return whether a target is a Together; of many thousands, isinstance would take a second."""
    return hasattr(target, "copy_all")


def _cut(alike: list[tuple[Filled, Tensor]]) -> Iterator[list[tuple[Filled, Tensor]]]:
    """Yield as many at a time as are to be written together."""
    count = max(BYTES_TOGETHER // max(alike[0][1].nbytes, 1), 1)
    for first in range(0, len(alike), count):
        yield alike[first : first + count]
