"""Qwen3 (Qwen3 Technical Report, 2025): a norm on every query and key head, biases if the config has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoinfer.models.description import Description
from nanoinfer.models.experts import read_experts, sparse_layers
from nanoinfer.models.reading import describe_common, read_windows, same_windows

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def describe(config: PretrainedConfig) -> Description:
    """Describe a Qwen3 model: with use_sliding_window, the layers that layer_types names have a window."""
    return describe_common(
        config,
        windows=read_windows(config, getattr(config, "sliding_window", None)),
        qk_norm="head",
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
    )


def describe_moe(config: PretrainedConfig, normalised: bool | None = None) -> Description:
    """Describe a Qwen3 model of experts: with use_sliding_window, all layers have a window.

    normalised: as for read_experts
    """
    return describe_common(
        config,
        windows=same_windows(config),
        qk_norm="head",
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        experts=read_experts(config, sparse_layers(config), "moe_intermediate_size", normalised),
    )
