"""The quantization_config of a checkpoint whose matrices have been quantized as they load, which table.py reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from nanoinfer.kernels.groups import Numbers
from nanoinfer.weights.formats.fp8.layout import Fp8Layout
from nanoinfer.weights.formats.groups.parts import Rounded
from nanoinfer.weights.formats.groups.store import GroupStore
from nanoinfer.weights.shards import Table

WEIGHT = ".weight"
# What compressed-tensors says of our groups: their packing, and their numbers.
GROUPS: dict[Numbers, tuple[str, dict[str, Any]]] = {
    "int4": ("pack-quantized", {"type": "int", "num_bits": 4}),
    "int8": ("pack-quantized", {"type": "int", "num_bits": 8}),
    "e2m1": ("mxfp4-pack-quantized", {"type": "float", "num_bits": 4, "scale_dtype": "torch.uint8"}),
}


class Kind(NamedTuple):
    """What sets matrices apart; group: how many of the inputs share a scale"""

    numbers: Numbers
    group: int
    has_zeros: bool


def config_of(table: Table, rename: Callable[[str], str]) -> dict[str, Any]:
    """Return the quantization_config; raises ValueError for numbers that compressed-tensors lacks.

    table: of a model whose matrices are quantized as table.ON_THE_FLY has them
    rename: makes a checkpoint's name of one in the table
    """
    renamed = {rename(name): shards[0] for name, shards in table.items() if name.endswith(WEIGHT)}
    plain = [
        name.removesuffix(WEIGHT)
        for name, shard in renamed.items()
        if isinstance(shard.target, Tensor) and len(shard.shape) == 2
    ]
    kinds = {
        name.removesuffix(WEIGHT): _kind_of(shard.target.store)
        for name, shard in renamed.items()
        if isinstance(shard.target, Rounded)
    }
    if kinds:
        return _compressed(kinds, plain)
    return {  # none is in groups: all are in FP8
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(Fp8Layout.block),
        "modules_to_not_convert": plain,
    }


def _kind_of(store: GroupStore) -> Kind:
    return Kind(store.layout.numbers, store.own_group, store.zeros is not None)


def _compressed(kinds: Mapping[str, Kind], plain: list[str]) -> dict[str, Any]:
    """Return that of compressed-tensors. kinds: of each matrix; plain: the matrices that are not quantized"""
    if others := {kind.numbers for kind in kinds.values()} - GROUPS.keys():
        raise ValueError(
            f"matrices in {', '.join(sorted(others))} cannot be written: compressed-tensors has {', '.join(GROUPS)}"
        )
    of_kind = defaultdict(list)
    for name, kind in kinds.items():
        of_kind[kind].append(name)
    *rest, most = sorted(of_kind, key=lambda kind: len(of_kind[kind]))
    targets = {**{kind: of_kind[kind] for kind in rest}, most: ["Linear"]}  # the first that holds decides
    packings = {GROUPS[kind.numbers][0] for kind in targets}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": packings.pop() if len(packings) == 1 else "mixed-precision",
        "config_groups": {f"group_{number}": _group(kind, targets[kind]) for number, kind in enumerate(targets)},
        "ignore": plain,
    }


def _group(kind: Kind, targets: list[str]) -> dict[str, Any]:
    packing, numbers = GROUPS[kind.numbers]
    how = {"symmetric": not kind.has_zeros, "dynamic": False, "strategy": "group", "group_size": kind.group}
    return {
        "targets": targets,
        "weights": {**numbers, **how},
        "input_activations": None,
        "output_activations": None,
        "format": packing,
    }
