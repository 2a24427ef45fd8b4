"""Llama (Touvron et al., 2023; Llama Team, 2024), and the many models that borrow its class."""

from __future__ import annotations

from transformers import PretrainedConfig

from nanoinfer.models.description import Description
from nanoinfer.models.reading import describe_common, head_dim_of, refuse_windows
from nanoinfer.models.rope import read_rope


def describe(config: PretrainedConfig) -> Description:
    """Norms before the branches, biases if the config has them."""
    refuse_windows(config)
    return describe_common(
        config,
        ropes=(read_rope(config, head_dim_of(config)),) * config.num_hidden_layers,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )
