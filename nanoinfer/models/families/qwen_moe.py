"""Qwen2 and Qwen3 with experts (Qwen Team, 2024 and 2025); those of Qwen2 stand beside a shared one."""

from __future__ import annotations

from transformers import PretrainedConfig

from nanoinfer.models.description import Description
from nanoinfer.models.experts import read_experts, sparse_layers
from nanoinfer.models.reading import describe_common, read_windows, same_windows
from nanoinfer.models.settings import size_of


def describe_qwen2(config: PretrainedConfig) -> Description:
    """Describe a Qwen2 model of experts: with use_sliding_window, the layers that layer_types names have a window."""
    shared_size = size_of(config, "shared_expert_intermediate_size")
    return describe_common(
        config,
        windows=read_windows(config, config.sliding_window or None),
        qkv_bias=config.qkv_bias,
        experts=read_experts(config, sparse_layers(config), "moe_intermediate_size", shared_size=shared_size),
    )


def describe_qwen3(config: PretrainedConfig) -> Description:
    """Describe a Qwen3 model of experts: with use_sliding_window, all layers have a window."""
    return describe_common(
        config,
        windows=same_windows(config),
        qk_norm="head",
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        experts=read_experts(config, sparse_layers(config), "moe_intermediate_size"),
    )
