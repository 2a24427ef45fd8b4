"""Reads the quantization_config of compressed-tensors (vLLM's LLM Compressor)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanoinfer.checks import short
from nanoinfer.weights.formats.formats import PLAIN_FORMATS, Formats
from nanoinfer.weights.formats.fp8.format import Fp8Format
from nanoinfer.weights.formats.fp8.reading import fp8_formats, read_block


def read_compressed(config: Mapping[str, Any]) -> Formats:
    """Read the formats of the groups of matrices; raises ValueError, naming it, for what is not supported."""
    groups = list((config.get("config_groups") or {}).values())
    if not groups:
        return PLAIN_FORMATS  # only the KV cache is quantized
    if len(groups) > 1:
        raise ValueError(f"model: quantization_config has {len(groups)} config_groups: must be one")
    weights, targets = groups[0].get("weights") or {}, groups[0].get("targets")
    if (weights.get("type"), weights.get("num_bits")) != ("float", 8) or targets != ["Linear"]:
        raise ValueError(
            f"model: quantization_config has weights={short(weights)} for targets={short(targets)}: must be 8-bit"
            " floats for ['Linear']"
        )
    strategy = weights.get("strategy")
    blocks: dict[Any, tuple[int | None, int | None]] = {"tensor": (None, None), "channel": (1, None)}
    if strategy == "block":
        blocks["block"] = read_block("block_structure", weights.get("block_structure"))
    if strategy not in blocks:
        raise ValueError(
            f"model: quantization_config has strategy={strategy!r}: must be 'tensor', 'channel' or 'block'"
        )
    return fp8_formats(Fp8Format(blocks[strategy], "weight_scale"), tuple(config.get("ignore") or ()))
