"""Qwen2 and Qwen2.5 (Qwen Team, 2024): Llama with biases of queries, keys and values."""

from __future__ import annotations

from transformers import PretrainedConfig

from nanoinfer.models.description import Description
from nanoinfer.models.reading import describe_common, read_windows


def describe(config: PretrainedConfig) -> Description:
    """Describe a Qwen2 model: with use_sliding_window, the layers that layer_types names have a window."""
    return describe_common(
        config,
        windows=read_windows(config, config.sliding_window),
        qkv_bias=True,
    )
