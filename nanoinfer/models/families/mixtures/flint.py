"""Flint (2026): Qwen3 of experts, with sinks in all layers; those without a window do not rotate."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nanoinfer.models.description import Description
from nanoinfer.models.module_names import ModuleNames
from nanoinfer.models.reading.experts import read_experts, sparse_layers
from nanoinfer.models.reading.rope import read_rope
from nanoinfer.models.reading.settings import head_dim_of, size_of
from nanoinfer.models.reading.shared import describe_common, read_windows

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAMES = ModuleNames(sinks=("sinks", "softmax_offset"))


def describe(config: PretrainedConfig) -> Description:
    """Describe a Flint model: routers score by sigmoids, and every token uses one more expert."""
    experts = read_experts(config, sparse_layers(config), "moe_intermediate_size")
    if experts is not None:
        experts = replace(
            experts,
            routing=replace(experts.routing, scoring="sigmoid"),
            float32_router=True,
            shared_size=size_of(config, "shared_expert_intermediate_size"),
        )
    windows = read_windows(config, config.sliding_window)
    rope = read_rope(config, head_dim_of(config))
    return describe_common(
        config,
        names=NAMES,
        windows=windows,
        ropes=tuple(None if window is None else rope for window in windows),
        qk_norm="head",
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        sinks=(True,) * config.num_hidden_layers,
        experts=experts,
    )
