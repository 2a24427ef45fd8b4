"""Which layers of a model are streamed: plain numbers, so that a test asks for any device."""

from __future__ import annotations

import math
from dataclasses import dataclass

BUFFERS = 2  # one layer computes while the next one comes
LARGE = 1 / 2  # of the largest layer's bytes: smaller layers stay, as long as the others suffice


@dataclass(frozen=True)
class LayerSizes:
    """The bytes of one rank's weights.

    layers: of each layer; rest: of embedding, head, norms and tables, which stay on the device
    """

    layers: tuple[int, ...]
    rest: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.layers) + self.rest


@dataclass(frozen=True)
class StreamPlan:
    """The layers that are streamed, in their order, and the bytes of each buffer through which they come."""

    layers: tuple[int, ...]
    buffer_bytes: int

    @classmethod
    def of(cls, layers: tuple[int, ...], sizes: LayerSizes) -> StreamPlan:
        """Plan to stream these layers."""
        return cls(layers, max((sizes.layers[layer] for layer in layers), default=0))

    def streamed_bytes(self, sizes: LayerSizes) -> int:
        """Return how many bytes lie in host memory."""
        return sum(sizes.layers[layer] for layer in self.layers)

    def saved_bytes(self, sizes: LayerSizes) -> int:
        """Return how many bytes of the device's memory streaming saves; the buffers take some."""
        return self.streamed_bytes(sizes) - BUFFERS * self.buffer_bytes


@dataclass(frozen=True)
class Resources:
    """What decides how many layers are streamed if nobody says it.

    room: the bytes of the device that weights and KV cache may take
    row_bytes: a row takes as many in the KV cache; rows: that may run at once, at most
    least_bytes: of the KV cache, for one sequence
    link, memory: bytes a second that come from the host, and that the device reads
    """

    room: int
    row_bytes: int
    rows: int
    least_bytes: int
    link: float
    memory: float

    def tokens_per_second(self, plan: StreamPlan, sizes: LayerSizes) -> float:
        """Return about how many tokens decode steps give; 0: the plan does not fit."""
        cache = self.room - sizes.total + plan.saved_bytes(sizes)
        if cache < self.least_bytes:
            return 0
        rows = min(self.rows, max(1.0, cache / self.row_bytes)) if self.row_bytes else self.rows
        return rows / max(plan.streamed_bytes(sizes) / self.link, sizes.total / self.memory)


NOTHING = StreamPlan((), 0)


def spread(count: int, layers: tuple[int, ...]) -> tuple[int, ...]:
    """Return so many of the layers, evenly spread, the first one among them.

    What follows the last one hides the copies with which a step ends: those of the next one's first layers.
    """
    return tuple(layers[number * len(layers) // count] for number in range(count))


def plans(sizes: LayerSizes) -> list[StreamPlan]:
    """Return a plan for each number of layers that saves memory, the one that streams the least first."""
    most = max(sizes.layers)
    large = tuple(layer for layer, size in enumerate(sizes.layers) if size >= LARGE * most)
    found = [StreamPlan.of(spread(count, large), sizes) for count in range(BUFFERS + 1, len(large) + 1)]
    if len(large) < len(sizes.layers):
        found.append(StreamPlan.of(tuple(range(len(sizes.layers))), sizes))
    return [plan for plan in found if plan.saved_bytes(sizes) > 0]


def plan_bytes(sizes: LayerSizes, num_bytes: float) -> StreamPlan | None:
    """Return the plan that keeps at least so many bytes in host memory, or all layers; None: it would save nothing."""
    possible = plans(sizes)
    if not possible or num_bytes < BUFFERS * max(sizes.layers):
        return None
    return next((plan for plan in possible if plan.streamed_bytes(sizes) >= num_bytes), possible[-1])


def plan_fastest(sizes: LayerSizes, resources: Resources) -> StreamPlan | None:
    """Return the plan that gives the most tokens a second, of equals the one that streams the least; None: none fits.

    Of a model that fits beside the KV cache that its rows want, nothing is streamed.
    """
    best = max([NOTHING, *plans(sizes)], key=lambda plan: resources.tokens_per_second(plan, sizes))
    return best if resources.tokens_per_second(best, sizes) else None


def least_gib(sizes: LayerSizes, lacking: int) -> float | None:
    """Return the least GiB of layers that make room for so many bytes, in four digits; None: all layers do not."""
    for plan in plans(sizes):
        if plan.saved_bytes(sizes) >= lacking:
            gib = plan.streamed_bytes(sizes) / 2**30
            digit = 10.0 ** (math.floor(math.log10(gib)) - 3)
            return round(math.floor(gib / digit) * digit, 9)
    return None
