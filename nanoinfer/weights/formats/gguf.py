"""The formats of matrices in GGUF files, whose types stay in their bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nanoinfer.gguf.blocks import CODES, KINDS, MINIMA, SCALES
from nanoinfer.weights.formats.formats import Formats
from nanoinfer.weights.formats.groups.fields import Field
from nanoinfer.weights.formats.groups.format import GroupFormat
from nanoinfer.weights.formats.groups.layout import Layout

OF_FOUR_BITS, OF_EIGHT_BITS = Field(CODES, "numbers"), Field(CODES, "numbers", added=128)
OTHERS = {SCALES: Field(SCALES, "scales"), MINIMA: Field(MINIMA, "minima")}
DTYPES = {"F16": torch.float16, "F32": torch.float32, "U8": torch.uint8}  # of scales


def _format_of(name: str) -> GroupFormat:
    """Return the format of a type."""
    kind = KINDS[name]
    codes = OF_EIGHT_BITS if kind.numbers == "int8" else OF_FOUR_BITS
    fields = (codes, *(OTHERS[part] for part in kind.parts if part != CODES))
    return GroupFormat(name, Layout(kind.numbers, fields, kind.group, DTYPES[kind.parts[SCALES].dtype]))


FORMATS = {name: _format_of(name) for name in KINDS}


def read_gguf(config: Mapping[str, Any]) -> Formats:
    """Read what gguf.modules says of a file: the modules of each type. Other types become numbers of the dtype."""
    rules = tuple((tuple(modules), FORMATS[kind]) for kind, modules in config["types"].items())
    return Formats(rules, mixes=True)
