"""Reads an adapter, and checks all of it before anything is written."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from nanoinfer.weights.adapters.config import MERGE, AdapterConfig
from nanoinfer.weights.adapters.halves import Halves, pair
from nanoinfer.weights.adapters.low_rank import Adapter, LowRank
from nanoinfer.weights.adapters.modules import Modules, Stack
from nanoinfer.weights.adapters.source import AdapterSource


class AdapterReader:
    """Reads adapters for one model."""

    def __init__(
        self, modules: Modules, max_rank: int, refused: Collection[str] = (), dtype: torch.dtype = torch.float32
    ) -> None:
        """Take max_adapter_rank, and what is known of the model.

        modules: the model's; refused: those that have no slots; dtype: of the slots
        """
        self.modules, self.max_rank, self._refused, self._dtype = modules, max_rank, refused, dtype

    def read(self, source: AdapterSource) -> Adapter:
        """Read an adapter. Raises ValueError, naming adapter, module and value, for what the model does not fit."""
        adapter: Adapter = {}
        try:
            for halves in pair(source.tensors):
                for module, update in self._updates(halves, source.config):
                    if module in adapter:
                        raise ValueError(f"{halves} are a second adapter of {module}")
                    if module in self._refused:
                        raise ValueError(f"{halves} are of experts, whose adapters nanoinfer lacks; {MERGE}")
                    adapter[module] = update
            if not adapter:
                raise ValueError("has no tensors named lora_A and lora_B")
            _check_numbers(adapter, self._dtype)
        except ValueError as error:
            raise ValueError(f"adapter={source.name!r}: {error}") from None
        return adapter

    def _updates(self, halves: Halves, config: AdapterConfig) -> Iterator[tuple[str, LowRank]]:
        """Yield what one pair of tensors adds, by the checkpoint's modules."""
        known, named = self.modules.find(halves.module), halves.module
        stacks = self.modules.stacks.get(known)
        if stacks is None:
            if not config.targets(named):
                raise ValueError(f"{named} has tensors, but the config's target_modules leave it out")
            yield known, self._update(halves, named, self.modules.shapes[known], 1, config)
            return
        stack = _fitting(halves, stacks)
        parameter = f"{named}.{stack.parameter}"
        if config.target_parameters and not config.targets_parameter(parameter):
            raise ValueError(f"{parameter} has tensors, but the config's target_parameters leave it out")
        yield from stack.split(self._update(halves, parameter, stack.shape, len(stack.modules), config))

    def _update(self, halves: Halves, name: str, shape: tuple[int, int], count: int, config: AdapterConfig) -> LowRank:
        """Check the tensors. name: as patterns match it; shape: of each of `count` matrices that they are for"""
        (outputs, inputs), rank = shape, halves.a.numel() // (count * shape[1])
        if rank < 1 or halves.a.shape != (rank * count, inputs) or halves.b.shape != (outputs, rank * count):
            r = "r" if count == 1 else f"{count} * r"
            raise ValueError(
                f"{halves}: {name} of this model needs [{r}, {inputs}] and [{outputs}, {r}]; the adapter may be another"
                " model's"
            )
        if (expected := config.rank_of(name)) not in (None, rank):
            raise ValueError(f"{name} has rank {rank}, but the config says {expected}")
        if rank > self.max_rank:
            raise ValueError(f"{name} has rank {rank}, but max_adapter_rank={self.max_rank}: must be at least {rank}")
        return LowRank(halves.a, halves.b, config.scale(name, rank))


def check_is_loaded(name: str, loaded: Collection[str]) -> None:
    """Raise ValueError, with the names most like it, unless an adapter is among those that are loaded."""
    if name not in loaded:
        like = difflib.get_close_matches(name, loaded) or sorted(loaded)
        names = f"loaded are {', '.join(map(repr, like))}" if like else "none is; llm.load_adapter(name, ...) loads one"
        raise ValueError(f"adapter={name!r}: is not loaded; {names}")


def _fitting(halves: Halves, stacks: list[Stack]) -> Stack:
    """Return the stack that the tensors fit: PEFT does not name it. No layer has two stacks of one shape."""
    for stack in stacks:
        if (*halves.b.shape[:1], *halves.a.shape[1:]) == stack.shape:
            return stack
    needed = " or ".join(f"{inputs} inputs and {outputs} outputs" for outputs, inputs in (one.shape for one in stacks))
    raise ValueError(f"{halves}: the experts of this model have {needed}; the adapter may be another model's")


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
