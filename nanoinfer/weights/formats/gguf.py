"""The formats of matrices in GGUF files, whose types stay in their bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nanoinfer.gguf.blocks import CODES, KINDS, MINIMA, SCALES
from nanoinfer.kernels.groups import Numbers
from nanoinfer.weights.formats.formats import Formats
from nanoinfer.weights.formats.groups.fields import Field
from nanoinfer.weights.formats.groups.format import GroupFormat
from nanoinfer.weights.formats.groups.layout import Layout
from nanoinfer.weights.formats.groups.layouts import PAIRS

IN_BYTES, IN_PAIRS = Field(CODES, "numbers", added=128), Field(CODES, "numbers", along_inputs=PAIRS)
OTHERS = {SCALES: Field(SCALES, "scales"), MINIMA: Field(MINIMA, "minima")}
DTYPES = {"F16": torch.float16, "F32": torch.float32, "U8": torch.uint8}  # of scales


def _format_of(name: str) -> GroupFormat:
    """Return the format of a type."""
    kind = KINDS[name]
    numbers: Numbers = "int8" if kind.per_byte == 1 else "e2m1" if name == "MXFP4" else "int4"
    fields = (IN_BYTES if kind.per_byte == 1 else IN_PAIRS, *(OTHERS[part] for part in kind.parts if part != CODES))
    return GroupFormat(name, Layout(numbers, fields, kind.group, DTYPES[kind.parts[SCALES].dtype]))


FORMATS = {name: _format_of(name) for name in KINDS}


def read_gguf(config: Mapping[str, Any]) -> Formats:
    """Read what gguf.modules says of a file: the modules of each type. Other types become numbers of the dtype."""
    rules = tuple((tuple(modules), FORMATS[kind]) for kind, modules in config["types"].items())
    return Formats(rules, mixes=True)
