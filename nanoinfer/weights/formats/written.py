"""The quantization_config of a checkpoint whose matrices have been quantized as they load, which table.py reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from nanoinfer.weights.formats.fp8.layout import Fp8Layout
from nanoinfer.weights.formats.groups.parts import Rounded
from nanoinfer.weights.shards import Table

WEIGHT = ".weight"
# What compressed-tensors says of our groups, by the value of the option `quantization`.
GROUPS: dict[str, tuple[str, dict[str, Any]]] = {
    "int4": ("pack-quantized", {"type": "int", "num_bits": 4}),
    "int8": ("pack-quantized", {"type": "int", "num_bits": 8}),
    "mxfp4": ("mxfp4-pack-quantized", {"type": "float", "num_bits": 4, "scale_dtype": "torch.uint8"}),
}


def config_of(quantization: str, table: Table, rename: Callable[[str], str]) -> dict[str, Any]:
    """Return the quantization_config.

    quantization: a name in table.ON_THE_FLY
    table: of a model whose matrices are quantized so
    rename: makes a checkpoint's name of one in the table
    """
    renamed = {rename(name): shards[0] for name, shards in table.items() if name.endswith(WEIGHT)}
    plain = [
        name.removesuffix(WEIGHT)
        for name, shard in renamed.items()
        if isinstance(shard.target, Tensor) and len(shard.shape) == 2
    ]
    if quantization in GROUPS:
        groups = {
            name.removesuffix(WEIGHT): shard.target.store.own_group
            for name, shard in renamed.items()
            if isinstance(shard.target, Rounded)
        }
        return _compressed(*GROUPS[quantization], groups, plain)
    assert quantization == "fp8"
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(Fp8Layout.block),
        "modules_to_not_convert": plain,
    }


def _compressed(
    packing: str, numbers: Mapping[str, Any], groups: Mapping[str, int], plain: list[str]
) -> dict[str, Any]:
    """Return that of compressed-tensors.

    groups: how many inputs of each matrix share a scale; plain: the matrices that are not quantized
    """
    of_size = defaultdict(list)
    for name, size in groups.items():
        of_size[size].append(name)
    *others, most = sorted(of_size, key=lambda size: len(of_size[size]))
    targets = {**{size: of_size[size] for size in others}, most: ["Linear"]}  # the first that holds decides
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": packing,
        "config_groups": {
            f"group_{number}": {
                "targets": targets[size],
                "weights": {
                    **numbers, "symmetric": True, "dynamic": False, "strategy": "group", "group_size": size,
                },
                "input_activations": None,
                "output_activations": None,
            }
            for number, size in enumerate(targets)
        },
        "ignore": plain,
    }  # fmt: skip
