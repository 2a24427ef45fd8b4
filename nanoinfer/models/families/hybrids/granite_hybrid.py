"""Granite 4 (IBM, 2025): Granite, most of whose layers are Mamba2's; some models have experts beside the MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nanoinfer.models.description import Description
from nanoinfer.models.families.granite import SHARED_NAMES, read_moe, read_multipliers
from nanoinfer.models.families.hybrids.settings import MAMBA, read_mamba
from nanoinfer.models.module_names import ModuleNames
from nanoinfer.models.reading.rope import read_rope
from nanoinfer.models.reading.settings import count_of, head_dim_of, size_of
from nanoinfer.models.reading.shared import describe_common, read_mixers

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAMES = ModuleNames(gate_up=("shared_mlp.input_linear",), down="shared_mlp.output_linear")


def describe(config: PretrainedConfig) -> Description:
    """Describe a Granite 4 model. What its config calls shared is its MLP, or beside experts one more of these."""
    mixers, size = read_mixers(config, {MAMBA: read_mamba(config)}), size_of(config, "shared_intermediate_size")
    experts = read_moe(config) if count_of(config, "num_local_experts") else None
    rotates = _read_positions(config)
    rope = read_rope(config, head_dim_of(config)) if rotates else None
    return describe_common(
        config,
        names=NAMES if experts is None else SHARED_NAMES,
        intermediate_size=size if experts is None else config.intermediate_size,
        experts=None if experts is None else replace(experts, shared_size=size),
        mixers=mixers,
        ropes=tuple(rope if mixer is None else None for mixer in mixers),
        **read_multipliers(config),
    )


def _read_positions(config: PretrainedConfig) -> bool:
    """Return whether queries and keys are rotated."""
    kind = config.position_embedding_type
    if kind not in (None, "nope", "rope"):
        raise ValueError(
            f"model: position_embedding_type={kind!r} in its config is not supported; supported: rope, nope, null"
        )
    return bool(kind == "rope")
