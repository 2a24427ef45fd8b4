"""Adapters of random numbers, for bench.py."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from itertools import cycle, islice
from typing import cast

import torch
from torch import Tensor

from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.llm import LLM
from nanoinfer.models.description import HEAD

TIMED_LOADS = 5  # of an adapter, in place of another of its name


def load_adapters(llm: LLM, count: int) -> tuple[list[str], float]:
    """Load adapters of the model's layers, beside all of their matrices that may have some.

    llm: of one engine
    Returns the adapters' names, and how many seconds a load takes from tensors on the engine's device (the median).
    """
    tensors = dict(_random_tensors(llm))
    names = [f"adapter-{number}" for number in range(count)]
    seconds: list[float] = []
    for name in [*names, *islice(cycle(names), TIMED_LOADS)]:
        _synchronize(llm)
        start = time.perf_counter()
        llm.load_adapter(name, tensors, alpha=llm.config.max_adapter_rank)
        _synchronize(llm)
        seconds.append(time.perf_counter() - start)
    return names, statistics.median(seconds[count:])


def _random_tensors(llm: LLM) -> Iterator[tuple[str, Tensor]]:
    config, adapters = llm.config, cast(LLMEngine, llm.engine).ranks.runner.holdings.adapters
    assert adapters is not None
    generator = torch.Generator(config.device).manual_seed(config.seed)
    for module, (outputs, inputs) in adapters.reader.modules.shapes.items():
        if module == HEAD:
            continue
        for which, shape in (("A", (config.max_adapter_rank, inputs)), ("B", (outputs, config.max_adapter_rank))):
            numbers = torch.randn(shape, generator=generator, device=config.device, dtype=config.torch_dtype)
            yield f"{module}.lora_{which}.weight", numbers * 0.02  # as small as a trained one's


def _synchronize(llm: LLM) -> None:
    if llm.config.device == "cuda":
        torch.cuda.synchronize()
