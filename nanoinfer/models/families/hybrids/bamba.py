"""Bamba (IBM, 2024): Llama, most of whose layers are Mamba2's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoinfer.models.description import Description
from nanoinfer.models.families.hybrids.settings import MAMBA, read_mamba
from nanoinfer.models.module_names import ModuleNames
from nanoinfer.models.reading.rope import read_rope, read_rotary_dim
from nanoinfer.models.reading.shared import describe_common, read_mixers

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAMES = ModuleNames(
    mlp_norm="pre_ff_layernorm",
    last_norm="model.final_layernorm",
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
)


def describe(config: PretrainedConfig) -> Description:
    """Describe a Bamba model."""
    rope = read_rope(config, read_rotary_dim(config))
    mixers = read_mixers(config, {MAMBA: read_mamba(config)})
    return describe_common(
        config,
        names=NAMES,
        mixers=mixers,
        ropes=tuple(rope if mixer is None else None for mixer in mixers),
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )
