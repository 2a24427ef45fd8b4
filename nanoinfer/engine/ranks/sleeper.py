"""Sleeper: which of the ranks' memory is offloaded, and the calls that offload and restore it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, get_args

from nanoinfer.runner.memory.lender import Tag

TAGS: tuple[Tag, ...] = get_args(Tag)


class Sleeper:
    """Offloads the memory of weights and KV cache of all ranks at once.

    asleep: what is offloaded now
    """

    def __init__(self, call: Callable[..., Any], asleep: set[Tag]) -> None:
        """call: runs a method of each rank's ModelRunner; returns rank 0's result."""
        self.asleep = asleep
        self._call = call

    def sleep(self, keep_weights: bool) -> str | None:
        """Offload all; returns why nothing has been, or None.

        keep_weights: those of a GPU are copied to host memory first, for which it may have no room
        """
        if keep_weights and "weights" not in self.asleep and (fault := self._call("holdings.save_weights")) is not None:
            return f"the host has no memory for the weights, of which sleep(level=2) keeps none: {fault}"
        self.asleep.update(TAGS)
        self._call("holdings.lend", keep_weights)
        return None

    def wake_up(self, tags: Collection[str]) -> str | None:
        """Restore what the tags name; returns why some of that stays offloaded, or None."""
        for tag in TAGS:
            if tag in tags and tag in self.asleep:
                if (fault := self._call("holdings.take_back", tag)) is not None:
                    return f"the device has no memory for the {tag}: {fault}"
                self.asleep.remove(tag)
        return None
