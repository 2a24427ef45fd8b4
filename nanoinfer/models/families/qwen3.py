"""Qwen3 (Qwen3 Technical Report, 2025): a norm on every query and key head, biases if the config has them.

Mellum 2 (JetBrains, 2026) is Qwen3 of experts, with windows, and other rotary settings in layers with one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoinfer.models.description import Description
from nanoinfer.models.reading.experts import listed_layers, read_experts, sparse_layers
from nanoinfer.models.reading.rope import read_rope
from nanoinfer.models.reading.settings import head_dim_of
from nanoinfer.models.reading.shared import describe_common, read_windows, same_windows

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from nanoinfer.layers.rotary import Rope


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


def describe_mellum(config: PretrainedConfig) -> Description:
    """Describe a Mellum model: the layers that layer_types names have a window."""
    ropes = {kind: _mellum_rope(config, kind) for kind in set(config.layer_types)}
    return describe_common(
        config,
        windows=read_windows(config, config.sliding_window),
        ropes=tuple(ropes[kind] for kind in config.layer_types),
        qk_norm="head",
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        experts=read_experts(config, listed_layers(config), "moe_intermediate_size"),
    )


def _mellum_rope(config: PretrainedConfig, kind: str) -> Rope:
    share = config.rope_parameters.get(kind, {}).get("partial_rotary_factor", 1)
    if share != 1:  # transformers reads it, but can only rotate whole heads
        raise ValueError(f"model: partial_rotary_factor={share!r} in its config is not supported here")
    return read_rope(config, head_dim_of(config), kind)
