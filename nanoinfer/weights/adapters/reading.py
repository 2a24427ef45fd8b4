"""Reads an adapter, and checks all of it before anything is written."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from nanoinfer.weights.adapters.config import AdapterConfig
from nanoinfer.weights.adapters.low_rank import Adapter, LowRank
from nanoinfer.weights.adapters.modules import Modules, Stack
from nanoinfer.weights.adapters.pairs import Pair, find_pairs
from nanoinfer.weights.adapters.source import AdapterSource


class AdapterReader:
    """Reads adapters for one model."""

    def __init__(self, modules: Modules, max_rank: int, dtype: torch.dtype = torch.float32) -> None:
        """modules: the model's; max_rank: max_adapter_rank, that of its slots; dtype: of the slots"""
        self.modules, self.max_rank, self._dtype = modules, max_rank, dtype

    def read(self, source: AdapterSource) -> Adapter:
        """Read an adapter. Raises ValueError, naming adapter, module and value, for what the model does not fit."""
        adapter: Adapter = {}
        try:
            for pair in find_pairs(source.tensors):
                for module, update in self._updates(pair, source.config):
                    if module in adapter:
                        raise ValueError(f"{pair} are a second adapter of {module}")
                    adapter[module] = update
            if not adapter:
                raise ValueError("has no tensors named lora_A and lora_B")
            _check_numbers(adapter, self._dtype)
        except ValueError as error:
            raise ValueError(f"adapter={source.name!r}: {error}") from None
        return adapter

    def _updates(self, pair: Pair, config: AdapterConfig) -> Iterator[tuple[str, LowRank]]:
        """Yield what one pair of tensors adds, by the checkpoint's modules."""
        known, named = self.modules.find(pair.module), pair.module
        stacks = self.modules.stacks.get(known)
        if stacks is None:
            if (target := config.target_of(named)) is None:
                raise ValueError(f"{named} has tensors, but the config's target_modules leave it out")
            yield known, self._update(pair, target, self.modules.shapes[known], 1, config)
            return
        stack = _fitting(pair, stacks)
        parameter = f"{named}.{stack.parameter}"
        if config.target_parameters and not config.targets_parameter(parameter):
            raise ValueError(f"{parameter} has tensors, but the config's target_parameters leave it out")
        yield from stack.split(self._update(pair, parameter, stack.shape, len(stack.modules), config))

    def _update(self, pair: Pair, name: str, shape: tuple[int, int], count: int, config: AdapterConfig) -> LowRank:
        """Check the tensors. name: as patterns match it; shape: of each of `count` matrices that they are for"""
        (outputs, inputs), rank = shape, pair.a.numel() // (count * shape[1])
        if rank < 1 or pair.a.shape != (rank * count, inputs) or pair.b.shape != (outputs, rank * count):
            r = "r" if count == 1 else f"{count} * r"
            raise ValueError(
                f"{pair}: {name} of this model needs [{r}, {inputs}] and [{outputs}, {r}]; the adapter may be another"
                " model's"
            )
        if (expected := config.rank_of(name)) not in (None, rank):
            raise ValueError(f"{name} has rank {rank}, but the config says {expected}")
        if rank > self.max_rank:
            raise ValueError(f"{name} has rank {rank}, but max_adapter_rank={self.max_rank}: must be at least {rank}")
        return LowRank(pair.a, pair.b, config.scale(name, rank))


def _fitting(pair: Pair, stacks: list[Stack]) -> Stack:
    """Return the stack that the tensors fit: PEFT does not name it. No layer has two stacks of one shape."""
    for stack in stacks:
        if (*pair.b.shape[:1], *pair.a.shape[1:]) == stack.shape:
            return stack
    needed = " or ".join(f"{inputs} inputs and {outputs} outputs" for outputs, inputs in (one.shape for one in stacks))
    raise ValueError(f"{pair}: the experts of this model have {needed}; the adapter may be another model's")


def _check_numbers(adapter: Adapter, dtype: torch.dtype) -> None:
    """Raise ValueError, naming a module, for numbers that are NaN, infinite, or too large for a slot of this dtype.

    The host waits once for each device.
    """
    on_devices: dict[torch.device, list[tuple[str, Tensor, float]]] = {}
    for module, update in adapter.items():
        for tensor, factor in ((update.a, 1.0), (update.b, abs(update.scale))):
            on_devices.setdefault(tensor.device, []).append((module, tensor, factor))
    for tensors in on_devices.values():
        norms = torch._foreach_norm([tensor for _, tensor, _ in tensors], ord=float("inf"))
        for (module, _, factor), largest in zip(tensors, torch.stack(norms).tolist(), strict=True):
            _check_largest(module, largest, factor, dtype)


def _check_largest(module: str, largest: float, factor: float, dtype: torch.dtype) -> None:
    """Check the largest number of a matrix. factor: what it is multiplied by, in float32"""
    if not math.isfinite(largest):
        raise ValueError(f"{module} has numbers that are NaN or infinite")
    most = torch.finfo(dtype).max
    if largest > torch.finfo(torch.float32).max or largest * factor > most:
        times = "" if factor == 1 else f" times {factor:.4g}, its alpha by its rank"
        raise ValueError(f"{module} has numbers of up to {largest:.4g}{times}: must be at most {most:.4g}, for {dtype}")
