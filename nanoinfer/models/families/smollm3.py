"""SmolLM3 (Hugging Face, 2025): Llama, but some layers do not rotate queries and keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoinfer.models.description import Description
from nanoinfer.models.reading import describe_common, read_windows
from nanoinfer.models.rope import read_rope
from nanoinfer.models.settings import head_dim_of, of_layers

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def describe(config: PretrainedConfig) -> Description:
    """Describe a SmolLM3 model: no_rope_layers has a 0 for each layer that does not rotate."""
    rope = read_rope(config, head_dim_of(config))
    return describe_common(
        config,
        windows=read_windows(config, config.sliding_window),
        ropes=tuple(rope if rotates else None for rotates in of_layers(config, "no_rope_layers")),
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )
