"""Reads the quantization_config of compressed-tensors (vLLM's LLM Compressor)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanoinfer.checks import as_int, short
from nanoinfer.weights.formats.configs.settings import (
    FOUND_BY,
    ROUNDED,
    WHERE,
    check_known,
    check_rounded,
    flag_in,
    mapping_in,
    mappings_in,
    names_in,
)
from nanoinfer.weights.formats.format import Format
from nanoinfer.weights.formats.formats import ALL, Formats
from nanoinfer.weights.formats.fp8.format import Fp8Format
from nanoinfer.weights.formats.fp8.reading import read_block
from nanoinfer.weights.formats.groups.format import GroupFormat
from nanoinfer.weights.formats.groups.layouts import MXFP4, MXFP4_GROUP, NVFP4, NVFP4_GROUP, int_quantized
from nanoinfer.weights.formats.groups.layouts import pack_quantized as packed
from nanoinfer.weights.formats.groups.reading import read_group
from nanoinfer.weights.formats.plain.format import PLAIN
from nanoinfer.weights.formats.rotated.reading import read_rotations

LINEAR = "Linear"  # among targets: all matrices that no other group names
READ = (
    "config_groups", "format", "ignore", "kv_cache_scheme", "sparsity_config", "transform_config",
    "version", "quantization_status", "global_compression_ratio",
    "dequantize", "run_compressed", "use_optimized_inference",  # how transformers computes
)  # fmt: skip
OF_SPARSITY = ("global_sparsity", "ignore", "registry_requires_subclass", "sparsity_structure", "targets")
OF_WEIGHTS = ("type", "num_bits", "symmetric", *FOUND_BY)
NO_GROUP, NO_ORDER = {"group_size": (-1,)}, {"actorder": ("static", "weight")}  # these change the calibration alone
FOUR_BITS = {  # by the size of groups: the strategy that has it, the packing and the format
    NVFP4_GROUP: ("tensor_group", "nvfp4-pack-quantized", GroupFormat("NVFP4", NVFP4)),
    MXFP4_GROUP: ("group", "mxfp4-pack-quantized", GroupFormat("MXFP4", MXFP4)),
}
ANY_PACKING = (None, "mixed-precision")  # leave it to the groups to say how they are packed
FP8_PACKINGS = (*ANY_PACKING, "float-quantized", "naive-quantized")


def read_compressed(config: Mapping[str, Any]) -> Formats:
    """Read the formats of the groups of matrices; raises ValueError, naming it, for what is not supported."""
    check_known(config, READ)
    check_rounded(config)
    check_known(mapping_in(config, "sparsity_config"), OF_SPARSITY, {"format": ("dense",)}, "sparsity_config")
    named: list[tuple[tuple[str, ...], Format]] = []
    others: list[tuple[tuple[str, ...], Format]] = []
    for name, group in mappings_in(config, "config_groups").items():
        inside = f"config_groups[{name!r}]"
        check_known(group, ("targets", "weights", "format", *ROUNDED), inside=inside)
        check_rounded(group, inside)
        format, targets = _format_of(group, config.get("format"), inside), group.get("targets")
        if not isinstance(targets, list) or not targets or not all(isinstance(target, str) for target in targets):
            raise ValueError(f"{WHERE} has targets={short(targets)}: must be a list of names, or of {LINEAR!r}")
        named.append((tuple(target for target in targets if target != LINEAR), format))
        if LINEAR in targets:
            others.append(((ALL,), format))
    rules = ((names_in(config, "ignore"), PLAIN), *named, *others)
    return Formats(rules, read_rotations(config))


def _format_of(group: Mapping[str, Any], default: Any, inside: str) -> Format:
    """default: what the config says of groups that do not name the way in which they are packed"""
    weights, packing = mapping_in(group, "weights"), group.get("format") or default
    kind, bits, inside = weights.get("type"), weights.get("num_bits"), f"{inside}.weights"
    is_symmetric = flag_in(weights, "symmetric", True)
    if (kind, bits) == ("float", 8) and packing in FP8_PACKINGS and is_symmetric:
        return _fp8(weights, inside)
    if kind == "int" and packing == "pack-quantized" and type(bits) is int and bits in (4, 8):
        return _integers(weights, bits, is_symmetric, inside)
    if (kind, bits, packing) == ("int", 8, "int-quantized") and is_symmetric:
        return GroupFormat("int8", int_quantized(_group_of(weights, NO_ORDER, inside)))
    if (kind, bits) == ("float", 4) and is_symmetric and (size := as_int(weights.get("group_size"))) in FOUR_BITS:
        strategy, own, format = FOUR_BITS[size]
        if packing in (*ANY_PACKING, own):
            idle = {"group_size": (size,), "strategy": (strategy,), "dynamic": (False,), **NO_ORDER}
            check_known(weights, OF_WEIGHTS, idle, inside)
            return format
    raise ValueError(
        f"{WHERE} has format={packing!r} and weights={short(weights)}: must be 8-bit floats, 4-bit"
        " floats in groups of 16 or 32, 4-bit or 8-bit integers in 'pack-quantized', or 8-bit ones in 'int-quantized';"
        " only 'pack-quantized' may have symmetric=False"
    )


def _fp8(weights: Mapping[str, Any], inside: str) -> Format:
    strategy = weights.get("strategy")
    blocks: dict[Any, tuple[int | None, int | None]] = {"tensor": (None, None), "channel": (1, None)}
    if strategy == "block":
        blocks["block"] = read_block("block_structure", weights.get("block_structure"))
    if not isinstance(strategy, str) or strategy not in blocks:
        raise ValueError(f"{WHERE} has strategy={strategy!r}: must be 'tensor', 'channel' or 'block'")
    own = ("strategy", "block_structure") if strategy == "block" else ("strategy",)
    check_known(weights, (*OF_WEIGHTS, *own), {**NO_GROUP, **NO_ORDER, "dynamic": (False,)}, inside)
    return Fp8Format(blocks[strategy], "weight_scale")


def _integers(weights: Mapping[str, Any], bits: int, is_symmetric: bool, inside: str) -> Format:
    order = weights.get("actorder")
    if order not in (None, False, True, "group", "dynamic", "static", "weight"):
        raise ValueError(f"{WHERE} has actorder={order!r}: must be 'group', 'static' or 'weight'")
    is_ordered = order in (True, "group", "dynamic")
    group = _group_of(weights, {"actorder": (order,)}, inside)
    return GroupFormat(f"int{bits}", packed(bits, group, is_symmetric, is_ordered))


def _group_of(weights: Mapping[str, Any], orders: Mapping[str, Any], inside: str) -> int:
    """Check the settings of integers, and return how many inputs share a scale; 0: all."""
    strategy = weights.get("strategy")
    if strategy not in ("group", "channel"):
        raise ValueError(f"{WHERE} has strategy={strategy!r}: must be 'group' or 'channel'")
    group = read_group(weights) if strategy == "group" else 0
    sizes = {"group_size": (group or -1,)}
    check_known(weights, (*OF_WEIGHTS, "strategy"), {**sizes, **orders, "dynamic": (False,)}, inside)
    return group
