"""Qwen2 and Qwen2.5 (Qwen Team, 2024): Llama with biases of queries, keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoinfer.models.description import Description
from nanoinfer.models.reading.experts import read_experts, sparse_layers
from nanoinfer.models.reading.settings import size_of
from nanoinfer.models.reading.shared import describe_common, read_windows

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def describe(config: PretrainedConfig) -> Description:
    """Describe a Qwen2 model: with use_sliding_window, the layers that layer_types names have a window."""
    return describe_common(
        config,
        windows=read_windows(config, config.sliding_window),
        qkv_bias=True,
    )


def describe_moe(config: PretrainedConfig) -> Description:
    """Describe a Qwen2 model of experts: with use_sliding_window, the layers that layer_types names have a window."""
    shared_size = size_of(config, "shared_expert_intermediate_size")
    return describe_common(
        config,
        windows=read_windows(config, config.sliding_window or None),
        qkv_bias=config.qkv_bias,
        experts=read_experts(config, sparse_layers(config), "moe_intermediate_size", shared_size=shared_size),
    )
