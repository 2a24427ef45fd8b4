"""Reads the config of NVIDIA's ModelOpt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanoinfer.weights.formats.format import Format
from nanoinfer.weights.formats.formats import ALL, Formats
from nanoinfer.weights.formats.fp8.format import Fp8Format
from nanoinfer.weights.formats.groups.format import GroupFormat
from nanoinfer.weights.formats.groups.layouts import MODELOPT, NVFP4_GROUP
from nanoinfer.weights.formats.groups.reading import read_choice, with_wildcards
from nanoinfer.weights.formats.plain.format import PLAIN
from nanoinfer.weights.formats.settings import mappings_in, names_in

ALGORITHMS: dict[str, Format] = {
    "NVFP4": GroupFormat("NVFP4", MODELOPT),
    "FP8": Fp8Format((None, None), "weight_scale"),
}
MIXED = "MIXED_PRECISION"


def read_modelopt(config: Mapping[str, Any]) -> Formats:
    """Read what config.json, or hf_quant_config.json, says; raises ValueError, naming it, for what is not supported.

    With mixed precision, "quantized_layers" has the algorithm of each matrix that is quantized.
    """
    algorithm = read_choice(config, "quant_algo", "", (*ALGORITHMS, MIXED))
    if algorithm == MIXED:
        layers = mappings_in(config, "quantized_layers").items()
        return Formats(tuple(((name,), _format_of(own)) for name, own in layers))
    ignored = (entry for name in ("exclude_modules", "ignore") for entry in names_in(config, name))
    return Formats(((tuple(map(with_wildcards, ignored)), PLAIN), ((ALL,), _format_of(config))))


def _format_of(config: Mapping[str, Any]) -> Format:
    algorithm = read_choice(config, "quant_algo", "", ALGORITHMS)
    group = config.get("group_size", NVFP4_GROUP)
    if algorithm == "NVFP4" and group != NVFP4_GROUP:
        raise ValueError(f"model: quantization_config has group_size={group!r}: must be {NVFP4_GROUP} for NVFP4")
    return ALGORITHMS[algorithm]
