"""Granite (IBM, 2024): Llama with multipliers of the embeddings, the scores, the branches' results and the logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoinfer.models.description import Description
from nanoinfer.models.reading import describe_common, refuse_windows
from nanoinfer.models.settings import positive

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def describe(config: PretrainedConfig) -> Description:
    """Describe a Granite model: four multipliers, and biases if the config has them."""
    refuse_windows(config)
    return describe_common(
        config,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        embedding_scale=config.embedding_multiplier,
        attention_scale=positive("attention_multiplier", config.attention_multiplier),
        residual_scale=config.residual_multiplier,
        logit_scale=1 / positive("logits_scaling", config.logits_scaling),
    )
