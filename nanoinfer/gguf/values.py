"""Values: what metadata of a GGUF file may be, by their keys."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

FLOATS = re.compile(r"epsilon|freq_base|_?scale$|factor|softcapping|yarn_|multiplier")
BOOLS = "expert_weights_norm", "rope.scaling.finetuned"
TEXTS = ("rope.scaling.type",)
OF_LAYERS = "attention.head_count_kv", "attention.sliding_window_pattern", "feed_forward_length"
PATTERN = "attention.sliding_window_pattern"
SECTIONS = "rope.dimension_sections"


def check_value(path: Path, architecture: str, key: str, value: Any, layers: Any) -> None:
    """Raise ValueError, naming file and key, for a value of another type than the architecture's setting has.

    key: without the architecture; layers: how many the file says it has
    """
    where, found = f"{path}: {architecture}.{key} in its metadata", value if isinstance(value, list) else [value]
    if isinstance(value, list) and key not in (*OF_LAYERS, SECTIONS):
        raise ValueError(f"{where} is an array of {len(value)}: must be one value")
    if isinstance(value, list) and key in OF_LAYERS and len(value) != layers:
        raise ValueError(f"{where} has {len(value)} values: must have one for each of block_count={layers} layers")
    kinds, what = _kinds_of(key)
    for one in found:
        if type(one) not in kinds or (isinstance(one, float) and not math.isfinite(one)):
            raise ValueError(f"{where} is {one!r}: must be {what}")
        if not isinstance(one, str) and one < 0:
            raise ValueError(f"{where} is {one!r}: must be at least 0")


def _kinds_of(key: str) -> tuple[tuple[type, ...], str]:
    if key in TEXTS:
        return (str,), "a string"
    if key in BOOLS:
        return (bool,), "true or false"
    if key == PATTERN:
        return (bool, int), "true or false, or a number of layers"
    return ((int, float), "a finite number") if FLOATS.search(key) else ((int,), "an integer")
