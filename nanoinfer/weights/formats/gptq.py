"""Reads the configs of GPTQ's tools (GPTQModel, AutoGPTQ), of AutoAWQ and of AutoRound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanoinfer.weights.formats.format import Format
from nanoinfer.weights.formats.formats import Formats
from nanoinfer.weights.formats.groups.format import GroupFormat
from nanoinfer.weights.formats.groups.layouts import awq, gptq
from nanoinfer.weights.formats.groups.reading import containing, pattern_of, read_bits, read_choice, read_group
from nanoinfer.weights.formats.plain.format import PLAIN
from nanoinfer.weights.formats.settings import mappings_in, names_in

HEAD = "lm_head"
LAYERS = r"re:.*\blayers\."  # these tools leave what is outside of them as it is, but for the head if they are told
PLAIN_BITS = 16  # of matrices that AutoRound leaves as they are, or more
PACKINGS = {  # AutoRound's: None: AWQ's; else: whether a zero is stored less one
    "auto_round:auto_awq": None,
    "auto_round:awq": None,
    "auto_round:auto_gptq": True,
    "auto_round:gptq": True,
    "auto_round:gptqmodel": False,
    "auto_round": False,
}


def read_gptq(config: Mapping[str, Any]) -> Formats:
    """Read the config of GPTQ; raises ValueError, naming the setting, for what is not supported.

    "dynamic" has settings of modules by regular expressions. Those behind "-:" are not quantized.
    """
    rules: list[tuple[tuple[str, ...], Format]] = []
    for entry, own in mappings_in(config, "dynamic").items():
        pattern = (f"re:{entry.removeprefix('+:').removeprefix('-:')}",)
        rules.append((pattern, PLAIN if entry.startswith("-:") else _gptq({**config, **own})))
    others = _gptq(config)
    return Formats((*rules, ((HEAD,), others if config.get("lm_head") else PLAIN), ((LAYERS,), others)))


def _gptq(config: Mapping[str, Any]) -> Format:
    version = read_choice(config, "checkpoint_format", "gptq", ("gptq", "gptq_v2"))
    bits, group = read_bits(config), read_group(config)
    symmetric, ordered = config.get("sym", True) is True, bool(config.get("desc_act")) and group != 0
    return GroupFormat("GPTQ", gptq(bits, group, symmetric, ordered, less_one=version == "gptq"))


def read_awq(config: Mapping[str, Any]) -> Formats:
    """Read the config of AutoAWQ; raises ValueError, naming the setting, for what is not supported."""
    read_bits(config, (4,))
    read_choice(config, "version", "gemm", ("gemm", "GEMM"))
    ignored = HEAD, *map(containing, names_in(config, "modules_to_not_convert"))
    layout = awq(read_group(config), symmetric=not config.get("zero_point", True))
    return Formats(((ignored, PLAIN), ((LAYERS,), GroupFormat("AWQ", layout))))


def read_auto_round(config: Mapping[str, Any]) -> Formats:
    """Read the config of AutoRound; raises ValueError, naming the setting, for what is not supported.

    "extra_config" has settings of modules by their names, or by regular expressions; of others, those in blocks that
    are named are quantized.
    """
    extra = mappings_in(config, "extra_config").items()
    rules = [((pattern_of(entry),), _auto_round({**config, **own})) for entry, own in extra]
    return Formats((*rules, ((HEAD,), PLAIN), (_blocks(config), _auto_round(config))))


def _blocks(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the patterns of the blocks that AutoRound has quantized: all layers, if none are named."""
    for name in ("block_name_to_quantize", "to_quant_block_names"):
        value = config.get(name)
        blocks = tuple(value.split(",")) if isinstance(value, str) else names_in(config, name)
        if blocks:
            return blocks
    return (LAYERS,)


def _auto_round(config: Mapping[str, Any]) -> Format:
    if type(config.get("bits")) is int and config["bits"] >= PLAIN_BITS:
        return PLAIN
    read_choice(config, "data_type", "int", ("int",))
    packing = PACKINGS[read_choice(config, "packing_format", "auto_round:auto_gptq", PACKINGS)]
    bits, group = read_bits(config, (4,) if packing is None else (4, 8)), read_group(config)
    symmetric = config.get("sym", True) is True
    layout = awq(group, symmetric) if packing is None else gptq(bits, group, symmetric, False, less_one=packing)
    return GroupFormat("AutoRound", layout)
