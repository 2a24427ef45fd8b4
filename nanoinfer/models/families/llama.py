"""Llama (Touvron et al., 2023; Llama Team, 2024), and the many models that use its class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoinfer.models.description import Description
from nanoinfer.models.reading import describe_common, refuse_windows

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def describe(config: PretrainedConfig) -> Description:
    """Describe a Llama model: norms before the branches, and biases if the config has them."""
    refuse_windows(config)
    return describe_common(
        config,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )
