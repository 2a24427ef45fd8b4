"""Where the parameters of layers get their memory while a model is built: streamed ones in buffers that they share."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from nanoinfer.models.causal_lm import CausalLM, Place
from nanoinfer.runner.memory.region import ALIGNMENT, FromRegion
from nanoinfer.runner.streaming.plan import BUFFERS, LayerSizes, StreamPlan


class Arena:
    """A part of a buffer from its beginning, from which one layer's parameters are taken.

    num_bytes: of the parameters and the gaps between them
    """

    def __init__(self, buffer: Tensor) -> None:
        """buffer: [bytes] uint8"""
        self.device, self._buffer, self.num_bytes = buffer.device, buffer, 0

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a new tensor with any content."""
        start = -(-self.num_bytes // ALIGNMENT) * ALIGNMENT
        size = math.prod(shape) * dtype.itemsize
        self.num_bytes = start + size
        assert self.num_bytes <= len(self._buffer)
        return self._buffer[start : self.num_bytes].view(dtype).view(shape)


class Count:
    """Counts the bytes of parameters that get no memory. num_bytes: as for Arena"""

    def __init__(self, device: torch.device) -> None:
        self.device, self.num_bytes = device, 0

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor without numbers."""
        start = -(-self.num_bytes // ALIGNMENT) * ALIGNMENT
        self.num_bytes = start + math.prod(shape) * dtype.itemsize
        return torch.empty(shape, dtype=dtype, device="meta")


def count_layers(build: Callable[[Place], CausalLM], num_layers: int, device: torch.device) -> LayerSizes:
    """Build a model whose parameters get no memory; returns their bytes. build: takes where layers get theirs"""
    layers, rest = [Count(device) for _ in range(num_layers)], Count(device)
    with FromRegion(rest):
        model = build(lambda layer: FromRegion(layers[layer]))
    tables = sum(table.nbytes for table in model.buffers())
    return LayerSizes(tuple(layer.num_bytes for layer in layers), rest.num_bytes + tables)


class LayerMemory:
    """The buffers, and an Arena in one of them for each layer that is streamed.

    The layers take the buffers in turn. arenas: by the layers' numbers, in their order
    """

    def __init__(self, plan: StreamPlan, device: torch.device) -> None:
        self.buffers = [torch.empty(plan.buffer_bytes, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
        self.arenas = {layer: Arena(self.buffers[turn % BUFFERS]) for turn, layer in enumerate(plan.layers)}

    def place(self, layer: int) -> AbstractContextManager[object]:
        """Return the context in which a layer is built."""
        arena = self.arenas.get(layer)
        return nullcontext() if arena is None else FromRegion(arena)
