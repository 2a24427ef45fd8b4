"""Finds the first tensor of a model that is another in company than alone, by looking at what each module returns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from nanoinfer.attention.context import Context
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.engine.sequence import Sequence
from nanoinfer.engine.step import PrefillStep, Step
from nanoinfer.llm import LLM

Place = tuple[int, int]  # a sample's number, and the position of a token in it
Results: TypeAlias = "Tensor | tuple[Results, ...] | None"  # of a module
Seen = list[tuple[str, Tensor]]  # the modules that have seen a token, in the order in which they ran, and their results


class Recorder:
    """What the modules of an eager engine's model return for the tokens of one request.

    seen: for each place, all times that the model has computed it: a preempted sequence's tokens come again
    """

    def __init__(self, request_id: int) -> None:
        self.seen: dict[Place, list[Seen]] = defaultdict(list)
        self._request_id = request_id
        self._owners: Iterator[Sequence] = iter(())  # of the step's tokens that no module has seen
        self._count = 0  # of the tokens that the model computes now
        self._wanted: dict[int, Seen] = {}  # by index among these tokens

    @contextmanager
    def watching(self, llm: LLM) -> Iterator[None]:
        """Record, in this block, what the first rank of an LLM without CUDA graphs computes."""
        assert isinstance(llm.engine, LLMEngine)
        row_map, model = llm.engine.row_map, llm.engine.ranks.runner.holdings.model
        describe = row_map.describe

        def noted(step: Step) -> Any:
            described = describe(step)
            self._owners = iter(_owners(step, row_map.seqs))
            return described

        hooks = [model.register_forward_pre_hook(self._begin)]
        hooks += [module.register_forward_hook(self._note(name)) for name, module in model.named_modules() if name]
        row_map.describe = noted  # type: ignore[method-assign]
        try:
            yield
        finally:
            del row_map.describe
            for hook in hooks:
                hook.remove()

    def _begin(self, model: nn.Module, inputs: tuple[Tensor, Context]) -> None:
        """Find the request's tokens among those that the model computes now."""
        positions = inputs[1].positions.tolist()
        self._count, self._wanted = len(positions), {}
        for index, seq in enumerate(islice(self._owners, len(positions))):
            if seq.request_id == self._request_id:
                self._wanted[index] = []
                self.seen[seq.sample_index, positions[index]].append(self._wanted[index])

    def _note(self, name: str) -> Any:
        """Make the hook that records a module's results."""

        def note(module: nn.Module, inputs: object, results: Results) -> None:
            for result in _tensors(results):
                tokens = 0 if len(result) == self._count else 1  # pieces of a product stand before its tokens
                for index, seen in self._wanted.items():
                    seen.append((name, result.select(tokens, index).cpu()))

        return note


def _tensors(results: Results) -> Iterator[Tensor]:
    """Yield the tensors of a module's results, among which a router has a tuple of its own."""
    if isinstance(results, tuple):
        for result in results:
            yield from _tensors(result)
    elif results is not None:
        yield results


def _owners(step: Step, rows: list[Sequence]) -> list[Sequence]:
    """Return the sequence of each token that a step computes, in the tokens' order. rows: the sequence in each row"""
    if isinstance(step, PrefillStep):
        return [chunk.seq for chunk in step.chunks for _ in range(chunk.start, chunk.end)]
    return rows.copy()


def first_difference(alone: Recorder, in_company: Recorder) -> str:
    """Say at which token, and in which module's result, two records of a request differ first."""
    for (sample, position), times in sorted(in_company.seen.items(), key=lambda entry: entry[0][::-1]):
        expected = alone.seen.get((sample, position)) or alone.seen.get((0, position))  # samples share their prompt
        if expected is None:
            continue
        for found in times:
            for (name, wanted), (_, result) in zip(expected[0], found, strict=True):
                if not torch.equal(wanted, result):
                    apart = (wanted.double() - result.double()).abs().max().item()
                    where = f"{name}, at position {position}, by up to {apart:.1e}"
                    return f"the first result that differs is that of {where}"
    return "no module's result differs in eager steps on so many ranks: look at CUDA graphs, ranks, logits and draws"
