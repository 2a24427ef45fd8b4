"""Nemotron-4 (NVIDIA, 2024) and Jais 2 (Inception, 2025): Llama's attention, LayerNorms and a squared ReLU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanoinfer.layers.norm import NormKind
from nanoinfer.models.description import Description
from nanoinfer.models.module_names import ModuleNames
from nanoinfer.models.reading.rope import read_rope, read_rotary_dim
from nanoinfer.models.reading.shared import describe_common

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def describe_nemotron(config: PretrainedConfig) -> Description:
    """Describe a Nemotron: norms' weights are stored less one, and a share of each head is rotated."""
    rope = read_rope(config, read_rotary_dim(config))
    norm = NormKind(centred=True, plus_one=True, has_bias=True)
    return _describe(config, "norm_eps", norm=norm, ropes=(rope,) * config.num_hidden_layers)


def describe_jais2(config: PretrainedConfig) -> Description:
    """Describe a Jais 2."""
    return _describe(config, "layer_norm_eps", norm=NormKind(centred=True, has_bias=True))


def _describe(config: PretrainedConfig, eps_field: str, **own: Any) -> Description:
    return describe_common(
        config,
        eps_field=eps_field,
        names=ModuleNames(gate_up=("mlp.up_proj",)),
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        is_gated=False,
        **own,
    )
