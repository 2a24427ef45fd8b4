"""A rank with slots for adapters, and adapters of random numbers as PEFT makes and saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoinfer.attention import make_backend
from nanoinfer.config import Config
from nanoinfer.models import build
from nanoinfer.models.description import HEAD
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.weights.adapters.bases import Bases, slot_rank
from nanoinfer.weights.adapters.modules import Modules
from nanoinfer.weights.adapters.reading import AdapterReader
from nanoinfer.weights.adapters.slots import Slots
from nanoinfer.weights.formats.plain.experts import PlainExperts
from nanoinfer.weights.formats.plain.matrix import PlainMatrix
from nanoinfer.weights.shards import Section, table_of
from nanoinfer.weights.sources import FileSource

MAX_RANK = 20  # of adapters; a slot's is 32


class Rank:
    """A rank's share of a model in float32, with slots for two adapters."""

    def __init__(
        self,
        folder: Path,
        rank: int = 0,
        size: int = 1,
        keeps_order: bool = False,
        slots: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        """keeps_order: as for TensorParallel; slots: their dtype, as adapters are checked; options: of the LLM"""
        config = Config(str(folder), dtype="float32", device="cpu", max_adapters=2, **options)
        tp, description = TensorParallel(), config.description
        tp.rank, tp.size, tp.keeps_order = rank, size, keeps_order
        self.model = build(description, 64, make_backend("torch", config.cache_layout), tp, torch.float32)
        shape = description.vocab_size, description.head_inputs
        self.bases = Bases(self.model, Section(HEAD, self.model.num_ids, shape, self.model.first_id))
        self.beside = description.beside
        self.slots = [Slots.make(base, 2, slot_rank(MAX_RANK)) for base in self.bases]
        self.reader = AdapterReader(Modules(self.model, self.bases, description.spelling), MAX_RANK, dtype=slots)

    def weights(self, folder: Path) -> list[Tensor]:
        """What the rank holds of a checkpoint's matrices, in the order of the slots."""
        FileSource(str(folder), self.beside).fill(table_of(self.model))
        held = []
        for module in self.bases.of_matrices:
            assert isinstance(module, PlainMatrix)
            held.append(module.weight)
        for experts in self.bases.of_experts:
            assert isinstance(experts, PlainExperts)
            held += [*experts.gate_up, *experts.down]
        return [weight.clone() for weight in (*held, self.model.lm_head.weight)]

    def added(self, slot: int) -> list[Tensor]:
        """What a slot adds to these matrices: b a, part by part."""
        return [_product(slots, slot) for slots in self.slots]

    def is_empty(self, slot: int) -> bool:
        """Whether a slot has zeros alone."""
        return not any(slots.a[slot].any() or slots.b[slot].any() for slots in self.slots)


def _product(slots: Slots, slot: int) -> Tensor:
    inputs = slots.a[slot].split(slots.b.shape[2])
    outputs = slots.b[slot].split(slots.base.part_rows)
    return torch.cat([b @ a for a, b in zip(inputs, outputs, strict=True)])


def adapt(model: Any, **settings: Any) -> Any:
    """Wrap a model of transformers in a PEFT model with an adapter of random numbers."""
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 6, **settings}))
    draw(wrapped, std=0.3)
    return wrapped


def draw(wrapped: Any, std: float) -> None:
    """Fill the adapters of a PEFT model with random numbers of this deviation: PEFT's own would add nothing."""
    torch.manual_seed(1)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=std)
