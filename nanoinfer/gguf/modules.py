"""Which modules of a checkpoint have which type in a GGUF file."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from nanoinfer.gguf.blocks import span_of, stays_in_bits, type_of
from nanoinfer.gguf.families import family_of
from nanoinfer.gguf.header import Header, import_gguf

OUTSIDE = "model.embed_tokens", "lm_head"  # of layers


def quantization_of(header: Header) -> dict[str, Any] | None:
    """Return a quantization_config with the modules of each type that stays in its bits; None: there are none.

    Types are named as blocks.type_of does. A tensor has the names of all classes whose files name it so; a model has
    but one of them.
    """
    gguf = import_gguf()
    (architecture,) = (number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == header.architecture)
    table = gguf.get_tensor_name_map(architecture, header.needed("block_count"))
    family, modules = family_of(header), defaultdict(list)
    for module, (_, name) in table.mapping.items():
        entry = header.entries.get(f"{name}.weight")
        is_ours = module.startswith("model.layers.") or module in OUTSIDE
        if entry is None or not is_ours or len(entry.shape) < 2:
            continue
        if stays_in_bits(entry, change := family.change_of(header, entry.name)):
            modules[type_of(entry.type, span_of(change))].append(module.replace(".experts.", ".experts.0."))
    return {"quant_method": "gguf", "types": dict(modules)} if modules else None
