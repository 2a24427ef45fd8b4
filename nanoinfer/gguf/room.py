"""How much memory the tensors of a GGUF file take once they are loaded."""

from __future__ import annotations

import logging
import math

from nanoinfer.gguf.header import read_header
from nanoinfer.gguf.tensor import PLAIN

log = logging.getLogger("nanoinfer")


def log_numbers(path: str, dtype: str, itemsize: int) -> None:
    """Log which types of few bits become numbers of a dtype, and their bytes before and then; itemsize: the dtype's"""
    entries = [entry for entry in read_header(path).entries.values() if entry.type not in PLAIN]
    if entries:
        types = ", ".join(sorted({entry.type for entry in entries}))
        stored = sum(entry.num_bytes for entry in entries)
        made = sum(math.prod(entry.shape) for entry in entries) * itemsize
        message = "%s: tensors in %s become numbers of %s as they load: they take %.2f GB, and %.2f GB in the file"
        log.info(message, path, types, dtype, made / 1e9, stored / 1e9)
