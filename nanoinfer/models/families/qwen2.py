"""Qwen2 and Qwen2.5 (Qwen Team, 2024): Llama with biases of queries, keys and values."""

from __future__ import annotations

from transformers import PretrainedConfig

from nanoinfer.models.description import Description
from nanoinfer.models.reading import describe_common, head_dim_of, read_windows
from nanoinfer.models.rope import read_rope


def describe(config: PretrainedConfig) -> Description:
    """Windows on the layers that layer_types names, if use_sliding_window."""
    return describe_common(
        config,
        windows=read_windows(config, config.sliding_window),
        ropes=(read_rope(config, head_dim_of(config)),) * config.num_hidden_layers,
        qkv_bias=True,
    )
