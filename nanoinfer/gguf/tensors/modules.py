"""Which modules of a checkpoint have which type in a GGUF file."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from nanoinfer.gguf.architectures.names import GgufNames
from nanoinfer.gguf.header import Header
from nanoinfer.gguf.tensors.composed import in_bits, type_in_bits


def quantization_of(header: Header) -> dict[str, Any] | None:
    """Return a quantization_config with the modules of each type that stays in its bits; None: there are none.

    Types are named as blocks.type_of does.
    """
    modules = defaultdict(list)
    for module, reader in GgufNames(header).matrices():
        if in_bits(reader):
            modules[type_in_bits(reader)].append(module)
    return {"quant_method": "gguf", "types": dict(modules)} if modules else None
