"""Qwen2 and Qwen2.5 (Qwen Team, 2024): Llama with biases of queries, keys and values."""

from __future__ import annotations

from transformers import PretrainedConfig

from nanoinfer.models.description import Description
from nanoinfer.models.reading import describe_common, read_windows


def describe(config: PretrainedConfig) -> Description:
    """Windows on the layers that layer_types names, if use_sliding_window."""
    return describe_common(
        config,
        windows=read_windows(config, config.sliding_window),
        qkv_bias=True,
    )
