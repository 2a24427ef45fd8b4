"""Pairs: the two tensors that PEFT stores for each module, found by their names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from nanoinfer.weights.adapters.config import MERGE
from nanoinfer.weights.roll import listed
from nanoinfer.weights.shards import FLOATS

# A trainer's own tensors have the adapter's name before the last dot, which files leave out.
TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<which>[AB])(?:\.[^.]+)?\.weight")
WRAPPED = ".base_layer"  # follows a module whose adapter wraps the adapter of another stack of the module
OF_BASE = ".base_layer.weight"  # ends the names of the base's own tensors, such as a head's, which PEFT saves beside
OTHERS = {  # what else PEFT may store, by a part of its name
    "lora_magnitude_vector": "scales of DoRA",
    "lora_embedding_": "the adapter of an embedding",
    "modules_to_save": "a whole module",
    "token_adapter": "embeddings of single tokens",
    ".bias": "a bias",
    "ia3_": "scales of IA3",
}


@dataclass
class Pair:
    """The two tensors of a module, or of a stack of experts, and their names: by "A" and "B".

    module: its name in the adapter
    """

    module: str
    names: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def a(self) -> Tensor:
        """Its lora_A, [rank, inputs] if it fits."""
        return self.tensors["A"]

    @property
    def b(self) -> Tensor:
        """Its lora_B, [outputs, rank] if it fits."""
        return self.tensors["B"]

    def __str__(self) -> str:
        return f"{self.names['A']} of shape {list(self.a.shape)} and its lora_B of {list(self.b.shape)}"


def find_pairs(tensors: Iterable[tuple[str, Tensor]]) -> list[Pair]:
    """Return the tensors of each module. Raises ValueError for tensors that are not LoRA's, and for single ones."""
    found: dict[str, Pair] = {}
    for name, tensor in tensors:
        if name.endswith(OF_BASE):
            continue
        match = TENSOR.fullmatch(name)
        if match is None:
            kind = next((kind for part, kind in OTHERS.items() if part in name), "neither lora_A nor lora_B")
            raise ValueError(f"{name} is {kind}, and nanoinfer adds the matrices of LoRA alone; {MERGE}")
        if tensor.dtype not in FLOATS:
            raise ValueError(f"{name} has numbers of {tensor.dtype}: must be floats of 16 bits or more")
        module, which = match["module"], match["which"]
        pair = found.setdefault(module, Pair(module.replace(WRAPPED, "")))
        if which in pair.names:
            raise ValueError(f"{name} and {pair.names[which]} are both the lora_{which} of {pair.module}")
        pair.names[which], pair.tensors[which] = name, tensor
    alone = {name for pair in found.values() if len(pair.names) == 1 for name in pair.names.values()}
    if alone:
        raise ValueError(f"must have both lora_A and lora_B of a module; only one is there: {listed(alone)}")
    return list(found.values())
