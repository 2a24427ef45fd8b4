"""OLMoE (Muennighoff et al., 2024): experts in all layers; a norm over all heads of queries and of keys."""

from __future__ import annotations

from transformers import PretrainedConfig

from nanoinfer.models.description import Description
from nanoinfer.models.experts import read_experts
from nanoinfer.models.reading import describe_common
from nanoinfer.models.settings import refuse


def describe(config: PretrainedConfig) -> Description:
    """Describe an OLMoE model."""
    refuse(config, clip_qkv=None)
    return describe_common(
        config,
        qk_norm="full",
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        experts=read_experts(config, (True,) * config.num_hidden_layers, "intermediate_size"),
    )
