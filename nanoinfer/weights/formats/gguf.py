"""The formats of matrices in GGUF files, whose types stay in their bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nanoinfer.gguf.tensors.blocks import CODES, FACTORS, K_BLOCK, KINDS, MINIMA, SCALES, factors_of
from nanoinfer.weights.formats.formats import Formats
from nanoinfer.weights.formats.groups.fields import Field
from nanoinfer.weights.formats.groups.format import GroupFormat
from nanoinfer.weights.formats.groups.layout import Layout

OTHER_CODES, OF_EIGHT_BITS = Field(CODES, "numbers"), Field(CODES, "numbers", added=128)
OTHERS = {SCALES: Field(SCALES, "scales"), MINIMA: Field(MINIMA, "minima")}
DTYPES = {"F16": torch.float16, "U8": torch.uint8}  # of scales
OF_FACTORS = torch.bfloat16  # scales and minima of six bits, or of eight with a sign, which blocks' factors multiply


def _format_of(name: str) -> GroupFormat:
    """Return the format of a type, which gguf.blocks.type_of names."""
    type_name, _, span = name.partition("/")
    kind = KINDS[type_name]
    codes = OF_EIGHT_BITS if kind.numbers == "int8" else OTHER_CODES
    fields = [codes, *(OTHERS[part] for part in kind.parts if part in OTHERS)]
    scales = DTYPES[kind.parts[SCALES].dtype]
    if FACTORS in kind.parts:
        scales = OF_FACTORS
        fields.append(Field(FACTORS, "blocks", block=factors_of(kind), span=int(span or K_BLOCK)))
    return GroupFormat(name, Layout(kind.numbers, tuple(fields), kind.group, scales), has_biases=True)


FORMATS = {name: _format_of(name) for name in KINDS}


def read_gguf(config: Mapping[str, Any]) -> Formats:
    """Read what gguf.modules says of a file: the modules of each type. Other types become numbers of the dtype."""
    rules = tuple((tuple(modules), _format_of(kind)) for kind, modules in config["types"].items())
    return Formats(rules, mixes=True)
