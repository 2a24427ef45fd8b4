"""Mistral (Jiang et al., 2023) and Ministral 3: Llama with a window, and with queries that grow with the position."""

from __future__ import annotations

from transformers import PretrainedConfig

from nanoinfer.models.description import Description, QueryScaling
from nanoinfer.models.reading import describe_common


def describe_mistral(config: PretrainedConfig) -> Description:
    """One window for all layers, if any."""
    return describe_common(
        config,
        windows=(config.sliding_window,) * config.num_hidden_layers,
    )


def describe_ministral3(config: PretrainedConfig) -> Description:
    """Likewise, and a scale for the queries of positions beyond the original length."""
    rope = config.rope_parameters
    scaling = QueryScaling(float(rope["llama_4_scaling_beta"]), int(rope["original_max_position_embeddings"]))
    return describe_common(
        config,
        windows=(config.sliding_window,) * config.num_hidden_layers,
        query_scaling=scaling if scaling.beta else None,
    )
