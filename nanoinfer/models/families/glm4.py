"""GLM-4 (Z.ai, 2025): norms before and after branches; half of each head is rotated, in pairs of neighbours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoinfer.models.description import Description, Names
from nanoinfer.models.reading import describe_common, refuse_windows
from nanoinfer.models.rope import read_rope, read_rotary_dim

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAMES = Names(
    attention_norm="input_layernorm",
    attention_post_norm="post_self_attn_layernorm",
    mlp_norm="post_attention_layernorm",
    mlp_post_norm="post_mlp_layernorm",
    gate_up=("mlp.gate_up_proj",),
)


def describe(config: PretrainedConfig) -> Description:
    """Describe a GLM-4 model: queries, keys and values have biases if the config says so."""
    refuse_windows(config)
    rope = read_rope(config, read_rotary_dim(config), interleaved=True)
    return describe_common(
        config,
        names=NAMES,
        ropes=(rope,) * config.num_hidden_layers,
        qkv_bias=config.attention_bias,
    )
