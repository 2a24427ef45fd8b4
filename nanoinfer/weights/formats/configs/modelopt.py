"""Reads the config of NVIDIA's ModelOpt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanoinfer.weights.formats.configs.settings import (
    ROUNDED,
    check_known,
    check_rounded,
    mapping_in,
    mappings_in,
    names_in,
)
from nanoinfer.weights.formats.format import Format
from nanoinfer.weights.formats.formats import ALL, Formats
from nanoinfer.weights.formats.fp8.format import Fp8Format
from nanoinfer.weights.formats.groups.format import GroupFormat
from nanoinfer.weights.formats.groups.layouts import MODELOPT, NVFP4_GROUP
from nanoinfer.weights.formats.groups.reading import read_choice, with_wildcards
from nanoinfer.weights.formats.plain.format import PLAIN

ALGORITHMS: dict[str, Format] = {
    "NVFP4": GroupFormat("NVFP4", MODELOPT),
    "FP8": Fp8Format((None, None), "weight_scale"),
}
BITS = {"NVFP4": 4, "FP8": 8}  # of the floats that "config_groups" describes once more
MIXED = "MIXED_PRECISION"
READ = (
    "quant_algo", "group_size", "exclude_modules", "ignore", "config_groups", "kv_cache_scheme",
    "producer", "smoothquant_val",
)  # fmt: skip
IDLE = {"kv_cache_quant_algo": ("FP8", "fp8", "NVFP4", "INT8")}  # nanoinfer rounds keys and values only if it is told


def read_modelopt(config: Mapping[str, Any]) -> Formats:
    """Read what config.json, or hf_quant_config.json, says; raises ValueError, naming it, for what is not supported.

    With mixed precision, "quantized_layers" has the algorithm of each matrix that is quantized.
    """
    algorithm = read_choice(config, "quant_algo", "", (*ALGORITHMS, MIXED))
    check_known(config, (*READ, "quantized_layers") if algorithm == MIXED else READ, IDLE)
    check_rounded(config)
    _check_groups(config, (BITS[algorithm],) if algorithm in BITS else tuple(BITS.values()))
    if algorithm == MIXED:
        layers = mappings_in(config, "quantized_layers").items()
        for name, own in layers:
            check_known(own, ("quant_algo", "group_size"), inside=f"quantized_layers[{name!r}]")
        return Formats(tuple(((name,), _format_of(own)) for name, own in layers))
    ignored = (entry for name in ("exclude_modules", "ignore") for entry in names_in(config, name))
    return Formats(((tuple(map(with_wildcards, ignored)), PLAIN), ((ALL,), _format_of(config))))


def _check_groups(config: Mapping[str, Any], bits: tuple[int, ...]) -> None:
    """Raise ValueError if "config_groups" says anything else than the algorithms. bits: theirs"""
    for name, group in mappings_in(config, "config_groups").items():
        inside = f"config_groups[{name!r}]"
        check_known(group, ("targets", "weights", *ROUNDED), inside=inside)
        check_rounded(group, inside)
        known = {"num_bits": bits, "type": ("float",), "group_size": (NVFP4_GROUP,), "dynamic": (False,)}
        check_known(mapping_in(group, "weights"), (), known, f"{inside}.weights")


def _format_of(config: Mapping[str, Any]) -> Format:
    algorithm = read_choice(config, "quant_algo", "", ALGORITHMS)
    group = config.get("group_size", NVFP4_GROUP)
    if algorithm == "NVFP4" and group != NVFP4_GROUP:
        raise ValueError(f"model: quantization_config has group_size={group!r}: must be {NVFP4_GROUP} for NVFP4")
    return ALGORITHMS[algorithm]
