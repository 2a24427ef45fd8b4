"""Qwen3, dense (Qwen3 Technical Report, 2025): a norm on every query and key head, biases if the config has them."""

from __future__ import annotations

from transformers import PretrainedConfig

from nanoinfer.models.description import Description
from nanoinfer.models.reading import describe_common, read_windows


def describe(config: PretrainedConfig) -> Description:
    """Describe a Qwen3 model: with use_sliding_window, the layers that layer_types names have a window."""
    return describe_common(
        config,
        windows=read_windows(config, getattr(config, "sliding_window", None)),
        qk_norm="head",
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
    )
