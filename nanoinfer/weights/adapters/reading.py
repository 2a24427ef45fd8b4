"""Reads an adapter, and checks all of it before anything is written."""

from __future__ import annotations

import math
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from nanoinfer.weights.adapters.config import AdapterConfig
from nanoinfer.weights.adapters.low_rank import Adapter, LowRank
from nanoinfer.weights.adapters.modules import ExpertStack, Modules
from nanoinfer.weights.adapters.pairs import Pair, find_pairs
from nanoinfer.weights.adapters.source import AdapterSource


class _Place(NamedTuple):
    """Where one pair of an adapter's tensors belongs: to a module of the checkpoint, or to a stack of several.

    a, b: which tensors they are, by number
    """

    target: str | ExpertStack
    a: int
    b: int
    scale: float


class _Form(NamedTuple):
    """What tells where an adapter's tensors belong: its settings, and the tensors' names, shapes and dtypes."""

    config: AdapterConfig
    tensors: list[tuple[str, torch.Size, torch.dtype]]

    @classmethod
    def of(cls, source: AdapterSource) -> _Form:
        return cls(source.config, [(name, tensor.shape, tensor.dtype) for name, tensor in source.tensors])


class AdapterReader:
    """Reads adapters for one model. A trainer sends many of one form, so the last one's is kept."""

    def __init__(self, modules: Modules, max_rank: int, dtype: torch.dtype = torch.float32) -> None:
        """modules: the model's; max_rank: max_adapter_rank, that of its slots; dtype: of the slots"""
        self.modules, self.max_rank, self._dtype = modules, max_rank, dtype
        self._last: tuple[_Form, list[_Place]] | None = None

    def read(self, source: AdapterSource) -> Adapter:
        """Read an adapter. Raises ValueError, naming adapter, module and value, for what the model does not fit."""
        try:
            adapter = _gather(source, self._places_of(source))
            _check_numbers(adapter, self._dtype)
        except ValueError as error:
            raise ValueError(f"adapter={source.name!r}: {error}") from None
        return adapter

    def _places_of(self, source: AdapterSource) -> list[_Place]:
        form = _Form.of(source)
        if self._last is None or self._last[0] != form:
            self._last = form, self._find_places(source)
        return self._last[1]

    def _find_places(self, source: AdapterSource) -> list[_Place]:
        """Check all but the numbers."""
        numbers = {name: number for number, (name, _) in enumerate(source.tensors)}
        places: list[_Place] = []
        modules: set[str] = set()
        for pair in find_pairs(source.tensors):
            target, scale = self._target(pair, source.config)
            for module in [target] if isinstance(target, str) else chain(*target.modules):
                if module in modules:
                    raise ValueError(f"{pair} are a second adapter of {module}")
                modules.add(module)
            places.append(_Place(target, numbers[pair.names["A"]], numbers[pair.names["B"]], scale))
        if not places:
            raise ValueError("has no tensors named lora_A and lora_B")
        return places

    def _target(self, pair: Pair, config: AdapterConfig) -> tuple[str | ExpertStack, float]:
        """Return what one pair of tensors adds to, and the factor of what it adds."""
        known, named = self.modules.find(pair.module), pair.module
        stacks = self.modules.stacks.get(known)
        if stacks is None:
            if (target := config.target_of(named)) is None:
                raise ValueError(f"{named} has tensors, but the config's target_modules leave it out")
            return known, self._scale(pair, target, self.modules.shapes[known], 1, config)
        stack = _fitting(pair, stacks)
        parameter = f"{named}.{stack.parameter}"
        if config.target_parameters and not config.targets_parameter(parameter):
            raise ValueError(f"{parameter} has tensors, but the config's target_parameters leave it out")
        return stack, self._scale(pair, parameter, stack.shape, len(stack.modules), config)

    def _scale(self, pair: Pair, name: str, shape: tuple[int, int], count: int, config: AdapterConfig) -> float:
        """Check the tensors' shapes, and return the factor of what they add.

        name: as patterns match it; shape: of each of `count` matrices that they are for
        """
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
        return config.scale(name, rank)


def _gather(source: AdapterSource, places: list[_Place]) -> Adapter:
    """Return what the tensors of an adapter add to each module."""
    tensors = [tensor for _, tensor in source.tensors]
    adapter: Adapter = {}
    for target, a, b, scale in places:
        update = LowRank(tensors[a], tensors[b], scale)
        adapter.update([(target, update)] if isinstance(target, str) else target.split(update))
    return adapter


def _fitting(pair: Pair, stacks: list[ExpertStack]) -> ExpertStack:
    """Return the stack that the tensors fit: PEFT does not name it."""
    fitting = [stack for stack in stacks if (*pair.b.shape[:1], *pair.a.shape[1:]) == stack.shape]
    for stack in fitting:
        if stack.modules != fitting[0].modules:  # of experts without gates that are as wide as their inputs
            raise ValueError(
                f"{pair}: they fit both {fitting[0].parameter} and {stack.parameter}, and PEFT does not say which;"
                " name the projections of each expert instead"
            )
    if fitting:
        return fitting[0]
    needed = " or ".join(f"{inputs} inputs and {outputs} outputs" for outputs, inputs in (one.shape for one in stacks))
    raise ValueError(f"{pair}: the experts of this model have {needed}; the adapter may be another model's")


def _check_numbers(adapter: Adapter, dtype: torch.dtype) -> None:
    """Raise ValueError, naming a module, for numbers that are NaN, infinite, or too large for a slot of this dtype.

    The host waits once for each device, unless one is near.
    """
    most = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    harmless = most / max(1.0, *(abs(update.scale) for update in adapter.values()))
    for tensors in _by_device(adapter).values():
        largest = torch.stack(torch._foreach_norm(tensors, ord=float("inf"))).tolist()
        if not all(own <= harmless for own in largest):  # a NaN is not less than any
            for module, update in adapter.items():
                for tensor, factor in ((update.a, 1.0), (update.b, abs(update.scale))):
                    _check_largest(module, float(tensor.abs().max()), factor, dtype)


def _by_device(adapter: Adapter) -> dict[torch.device, list[Tensor]]:
    tensors: dict[torch.device, list[Tensor]] = {}
    for a, b, _ in adapter.values():
        tensors.setdefault(a.device, []).append(a)
        tensors.setdefault(b.device, []).append(b)
    return tensors


def _check_largest(module: str, largest: float, factor: float, dtype: torch.dtype) -> None:
    """Check the largest number of a matrix. factor: what it is multiplied by, in float32"""
    if not math.isfinite(largest):
        raise ValueError(f"{module} has numbers that are NaN or infinite")
    most = torch.finfo(dtype).max
    if largest > torch.finfo(torch.float32).max or largest * factor > most:
        times = "" if factor == 1 else f" times {factor:.4g}, its alpha by its rank"
        raise ValueError(f"{module} has numbers of up to {largest:.4g}{times}: must be at most {most:.4g}, for {dtype}")
