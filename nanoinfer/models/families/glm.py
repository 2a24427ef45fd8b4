"""GLM-4 (Z.ai, 2024 and 2025): a share of each head is rotated, in pairs of neighbours; 0414 has norms on results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoinfer.models.description import Description
from nanoinfer.models.module_names import ModuleNames
from nanoinfer.models.reading.rope import read_rope, read_rotary_dim
from nanoinfer.models.reading.shared import describe_common, refuse_windows

if TYPE_CHECKING:
    from transformers import PretrainedConfig

GATE_UP = ("mlp.gate_up_proj",)
GLM4_NAMES = ModuleNames(
    attention_norm="input_layernorm",
    attention_post_norm="post_self_attn_layernorm",
    mlp_norm="post_attention_layernorm",
    mlp_post_norm="post_mlp_layernorm",
    gate_up=GATE_UP,
)


def describe_glm(config: PretrainedConfig) -> Description:
    """Describe a model of the first GLM-4 checkpoints: norms stand before the branches alone."""
    return _describe(config, ModuleNames(gate_up=GATE_UP), config.attention_bias)


def describe_glm4(config: PretrainedConfig) -> Description:
    """Describe a model of the GLM-4-0414 checkpoints: branches' results have norms, too."""
    return _describe(config, GLM4_NAMES, config.attention_bias)


def describe_glm4v(config: PretrainedConfig) -> Description:
    """Describe the text part of GLM-4.1V and 4.6V-Flash: a GLM-4-0414 with biases."""
    return _describe(config, GLM4_NAMES, True)


def _describe(config: PretrainedConfig, names: ModuleNames, has_biases: bool) -> Description:
    refuse_windows(config)
    rope = read_rope(config, read_rotary_dim(config), interleaved=True)
    return describe_common(
        config,
        names=names,
        ropes=(rope,) * config.num_hidden_layers,
        qkv_bias=has_biases,
    )
