"""Reads the quantization_config of compressed-tensors (vLLM's LLM Compressor)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanoinfer.checks import as_int, short
from nanoinfer.weights.formats.format import Format
from nanoinfer.weights.formats.formats import ALL, Formats
from nanoinfer.weights.formats.fp8.format import Fp8Format
from nanoinfer.weights.formats.fp8.reading import read_block
from nanoinfer.weights.formats.groups.format import GroupFormat
from nanoinfer.weights.formats.groups.layouts import MXFP4, MXFP4_GROUP, NVFP4, NVFP4_GROUP, int_quantized
from nanoinfer.weights.formats.groups.layouts import pack_quantized as packed
from nanoinfer.weights.formats.groups.reading import read_group
from nanoinfer.weights.formats.plain.format import PLAIN
from nanoinfer.weights.formats.settings import mapping_in, mappings_in, names_in

LINEAR = "Linear"  # among targets: all matrices that no other group names
FOUR_BITS = {NVFP4_GROUP: GroupFormat("NVFP4", NVFP4), MXFP4_GROUP: GroupFormat("MXFP4", MXFP4)}


def read_compressed(config: Mapping[str, Any]) -> Formats:
    """Read the formats of the groups of matrices; raises ValueError, naming it, for what is not supported."""
    named: list[tuple[tuple[str, ...], Format]] = []
    others: list[tuple[tuple[str, ...], Format]] = []
    for group in mappings_in(config, "config_groups").values():
        format, targets = _format_of(group, config.get("format")), group.get("targets")
        if not isinstance(targets, list) or not targets or not all(isinstance(target, str) for target in targets):
            raise ValueError(
                f"model: quantization_config has targets={short(targets)}: must be a list of names, or of {LINEAR!r}"
            )
        named.append((tuple(target for target in targets if target != LINEAR), format))
        if LINEAR in targets:
            others.append(((ALL,), format))
    return Formats(((names_in(config, "ignore"), PLAIN), *named, *others))


def _format_of(group: Mapping[str, Any], default: Any) -> Format:
    """default: what the config says of groups that do not name the way in which they are packed"""
    weights, packing = mapping_in(group, "weights"), group.get("format") or default
    kind, bits = weights.get("type"), weights.get("num_bits")
    if (kind, bits) == ("float", 8):
        return _fp8(weights)
    if (kind, bits) == ("float", 4) and (group_size := as_int(weights.get("group_size"))) in FOUR_BITS:
        return FOUR_BITS[group_size]
    if kind == "int" and packing == "pack-quantized" and type(bits) is int and bits in (4, 8):
        return _integers(weights, bits)
    if (kind, bits, packing) == ("int", 8, "int-quantized"):
        return GroupFormat("int8", int_quantized(_group_of(weights)))
    raise ValueError(
        f"model: quantization_config has format={packing!r} and weights={short(weights)}: must be 8-bit floats, 4-bit"
        " floats in groups of 16 or 32, 4-bit or 8-bit integers in 'pack-quantized', or 8-bit ones in 'int-quantized'"
    )


def _fp8(weights: Mapping[str, Any]) -> Format:
    strategy = weights.get("strategy")
    blocks: dict[Any, tuple[int | None, int | None]] = {"tensor": (None, None), "channel": (1, None)}
    if strategy == "block":
        blocks["block"] = read_block("block_structure", weights.get("block_structure"))
    if not isinstance(strategy, str) or strategy not in blocks:
        raise ValueError(
            f"model: quantization_config has strategy={strategy!r}: must be 'tensor', 'channel' or 'block'"
        )
    return Fp8Format(blocks[strategy], "weight_scale")


def _integers(weights: Mapping[str, Any], bits: int) -> Format:
    order = weights.get("actorder")
    if order not in (None, False, True, "group", "dynamic", "static", "weight"):
        raise ValueError(f"model: quantization_config has actorder={order!r}: must be 'group', 'static' or 'weight'")
    is_ordered = order in (True, "group", "dynamic")
    layout = packed(bits, _group_of(weights), weights.get("symmetric", True) is True, is_ordered)
    return GroupFormat(f"int{bits}", layout)


def _group_of(weights: Mapping[str, Any]) -> int:
    strategy = weights.get("strategy")
    if strategy not in ("group", "channel"):
        raise ValueError(f"model: quantization_config has strategy={strategy!r}: must be 'group' or 'channel'")
    return read_group(weights) if strategy == "group" else 0
