"""The formats of matrices that bitsandbytes has written, and of those that are rounded as it does.

LLM.int8 multiplies in eight bits, but for the inputs that are large in some token, which keep the model's dtype. Here
all inputs keep it, and nothing is lost that LLM.int8 has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nanoinfer.checks import as_number
from nanoinfer.kernels.groups import BITSANDBYTES, Numbers
from nanoinfer.weights.bitsandbytes.matrix import BLOCK, CODES, NUMBERS, SCALES
from nanoinfer.weights.formats.configs.settings import check_known, flag_in, mapping_in, names_in, wrong
from nanoinfer.weights.formats.formats import Formats, all_in
from nanoinfer.weights.formats.groups.fields import Field, Packing
from nanoinfer.weights.formats.groups.format import GroupFormat
from nanoinfer.weights.formats.groups.layout import Layout
from nanoinfer.weights.formats.groups.reading import read_choice
from nanoinfer.weights.formats.plain.format import PLAIN

MODULES = "modules"  # what checkpoint.py adds to a config: the modules of each kind in the files
FIRST_ABOVE = Packing(4, (1, 0))  # the first number of a byte has the higher bits
BY = Field(f"weight{SCALES}", "scales")


def _of_four_bits(numbers: Numbers) -> GroupFormat:
    fields = Field(f"weight{CODES}", "numbers", along_inputs=FIRST_ABOVE), BY
    return GroupFormat(numbers.upper(), Layout(numbers, fields, BLOCK, torch.float32))


FORMATS: dict[str, GroupFormat] = {
    **{numbers: _of_four_bits(numbers) for numbers in BITSANDBYTES},
    "int8": GroupFormat(
        "LLM.int8", Layout("int8", (Field(f"weight{CODES}", "numbers", added=128), BY), 0, torch.float32)
    ),
}
OF_LOADING = (  # how transformers would compute, and what it would leave as it is
    "load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit", "bnb_4bit_compute_dtype", "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant", "llm_int8_enable_fp32_cpu_offload", "llm_int8_skip_modules", "llm_int8_threshold",
)  # fmt: skip
IDLE = {"bnb_4bit_quant_storage": ("uint8",), "llm_int8_has_fp16_weight": (False,)}


def read_bitsandbytes(config: Mapping[str, Any]) -> Formats:
    """Read the config; raises ValueError, naming the setting, for what is not supported.

    The files say which matrices are quantized. Where there are none, all are, but for the head and modules that
    "llm_int8_skip_modules" names.
    """
    check_known(config, (*OF_LOADING, MODULES), IDLE)
    if as_number(threshold := config.get("llm_int8_threshold", 6.0)) is None:
        raise wrong("llm_int8_threshold", threshold, "a number")
    skipped, in_four_bits = names_in(config, "llm_int8_skip_modules"), flag_in(config, "load_in_4bit", False)
    kind = read_choice(config, "bnb_4bit_quant_type", "fp4", BITSANDBYTES) if in_four_bits else "int8"
    if MODULES not in config:
        return all_in(FORMATS[kind], skipped)
    modules = mapping_in(config, MODULES)
    if not modules:
        raise ValueError(
            "model: quantization_config has quant_method='bitsandbytes', but no matrix in the files is bitsandbytes':"
            " remove it from config.json; quantization='nf4' rounds them as they load"
        )
    rules = tuple((tuple(names), PLAIN if kind == NUMBERS else FORMATS[kind]) for kind, names in modules.items())
    return Formats(rules, mixes=True)
