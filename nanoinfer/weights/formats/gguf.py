"""The formats of matrices in GGUF files, whose types stay in their bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nanoinfer.gguf.blocks import CODES, GROUP, SCALES
from nanoinfer.weights.formats.formats import Formats
from nanoinfer.weights.formats.groups.fields import Field
from nanoinfer.weights.formats.groups.format import GroupFormat
from nanoinfer.weights.formats.groups.layout import Layout
from nanoinfer.weights.formats.groups.layouts import PAIRS

IN_BYTES, IN_PAIRS = Field(CODES, "numbers", added=128), Field(CODES, "numbers", along_inputs=PAIRS)
BY = Field(SCALES, "scales")
FORMATS = {
    "Q8_0": GroupFormat("Q8_0", Layout("int8", (IN_BYTES, BY), GROUP, torch.float16)),
    "Q5_0": GroupFormat("Q5_0", Layout("int8", (IN_BYTES, BY), GROUP, torch.float16)),
    "Q4_0": GroupFormat("Q4_0", Layout("int4", (IN_PAIRS, BY), GROUP, torch.float16)),
    "MXFP4": GroupFormat("MXFP4", Layout("e2m1", (IN_PAIRS, BY), GROUP, torch.uint8)),
}


def read_gguf(config: Mapping[str, Any]) -> Formats:
    """Read what gguf.modules says of a file: the modules of each type. Other types become numbers of the dtype."""
    rules = tuple((tuple(modules), FORMATS[kind]) for kind, modules in config["types"].items())
    return Formats(rules, mixes=True)
