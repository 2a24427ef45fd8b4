"""Modules: what an adapter may name in a model, and which of the checkpoint's matrices that is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from nanoinfer.weights.adapters.bases import Bases
from nanoinfer.weights.adapters.config import MERGE
from nanoinfer.weights.adapters.low_rank import LowRank
from nanoinfer.weights.formats.experts import ExpertSizes, ExpertTensors
from nanoinfer.weights.names import AS_STORED, LANGUAGE_MODEL, OTHER_MODELS, Spelling
from nanoinfer.weights.roll import listed, names_like
from nanoinfer.weights.shards import table_of

WEIGHT = ".weight"
ROUTERS = {"gate", "router", "shared_expert_gate"}  # end the names of what weighs experts, or come just before the end


@dataclass(frozen=True)
class ExpertStack:
    """A stack of one matrix for each expert of a layer, as transformers holds them since its version 5.

    parameter: its name in the module
    shape: [outputs, inputs] of an expert's matrix
    modules: for each expert, the checkpoint's modules that share the outputs; empty: the entry is no expert's
    by_turns: the outputs go to these in turn, not one after another
    """

    parameter: str
    shape: tuple[int, int]
    modules: list[tuple[str, ...]]
    by_turns: bool

    def split(self, update: LowRank) -> Iterator[tuple[str, LowRank]]:
        """Yield what is added to each module.

        update: as PEFT adapts a stack (lora.ParamWrapper): a, [experts * rank, inputs], expert by expert; and b,
            [outputs, rank * experts], whose columns are those of the experts in turn
        """
        count = len(self.modules)
        every_a, every_b = update.a.unflatten(0, (count, -1)), update.b.unflatten(1, (-1, count))
        for number, modules in ((number, modules) for number, modules in enumerate(self.modules) if modules):
            b = every_b[:, :, number]
            shares = [b[place :: len(modules)] for place in range(len(modules))]
            for module, share in zip(modules, shares if self.by_turns else b.chunk(len(modules)), strict=True):
                yield module, LowRank(every_a[number], share, update.scale)


class Modules:
    """The modules that an adapter may name: all ranks have the same.

    shapes: of the matrices, [outputs, inputs] over all ranks, by the module that the checkpoint names
    stacks: by the module that has them
    """

    def __init__(self, model: nn.Module, bases: Bases, spelling: Spelling = AS_STORED) -> None:
        """spelling: that of the model's checkpoints"""
        self._spelling = spelling
        self.shapes = {section.name: section.shape for base in bases for section in base.sections}
        self.stacks: dict[str, list[ExpertStack]] = {}
        for experts in bases.of_experts:
            for module, stack in _stacks(experts.tensors, experts.sizes):
                self.stacks.setdefault(module, []).append(stack)
        self._others = dict(_other_names(model))

    def find(self, name: str) -> str:
        """Return a module's name in the checkpoint. Raises ValueError, saying what it is not, for an unknown one.

        name: as a trainer calls it: in a multimodal model or out of it, with its head or without
        """
        bare = name.replace(LANGUAGE_MODEL, "", 1)
        for spelling in (bare, f"model.{bare}", self._spelling.known_name(bare) or bare):
            for known in (spelling, self._others.get(spelling)):  # a tied head's other name is the embedding's
                if known in self.shapes or known in self.stacks:
                    return known
        raise ValueError(self._describe_unknown(name, bare))

    def _describe_unknown(self, name: str, bare: str) -> str:
        if name.removeprefix("model.").startswith(OTHER_MODELS):
            return f"{name} is not of the language model, which alone has adapters: name it in exclude_modules"
        if bare.endswith("embed_tokens"):
            return f"{name} is an embedding, which has no adapters: {MERGE}"
        if self.stacks and not ROUTERS.isdisjoint(bare.split(".")[-2:]):
            return (
                f"{name} weighs experts, and has no adapters: train with a list of projections as target_modules, as"
                f" PEFT's 'all-linear' may take routers too, or {MERGE}"
            )
        known = [*self.shapes, *self.stacks]
        like = names_like([bare], known) or [listed(set(known))]
        return f"{name} is no matrix that may have an adapter; such are {', '.join(like)}. Train without it, or {MERGE}"


def _stacks(tensors: ExpertTensors, sizes: ExpertSizes) -> Iterator[tuple[str, ExpertStack]]:
    """Yield each stack that may hold a layer's experts, and the module that has it."""

    def of_experts(*projections: str) -> list[tuple[str, ...]]:
        return [tuple(tensors.module(one, number) for one in projections) for number in range(sizes.count)]

    above, downs = of_experts(*tensors.above), of_experts(tensors.down)
    above += [()] * sizes.identities
    shapes = (len(tensors.above) * sizes.size, sizes.hidden_size), (sizes.hidden_size, sizes.size)
    for pair in tensors.stacks:
        for stack, shape, modules in zip(pair, shapes, (above, downs), strict=True):
            module, _, parameter = stack.rpartition(".")
            yield module, ExpertStack(parameter, shape, modules, by_turns=tensors.paired)


def _other_names(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield each module's name that a checkpoint may have instead of another, and the other."""
    for name, (shard, *_) in table_of(model).items():
        for other in shard.replaces:
            if name.endswith(WEIGHT) and other.endswith(WEIGHT) and shard.entry is None:
                yield name.removesuffix(WEIGHT), other.removesuffix(WEIGHT)
