"""gpt-oss (OpenAI, 2025): attention with sinks, windows in every second layer, and experts with biases."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nanoinfer.kernels.linear.activation import ClampedSwiGLU
from nanoinfer.models.description import Description
from nanoinfer.models.module_names import ModuleNames
from nanoinfer.models.reading.experts import read_experts
from nanoinfer.models.reading.settings import positive, refuse
from nanoinfer.models.reading.shared import describe_common, read_windows

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAMES = ModuleNames(routers=("mlp.router",), paired_experts=True)


def describe(config: PretrainedConfig) -> Description:
    """All layers have experts. A token's weights are the softmax of its chosen logits."""
    refuse(config, hidden_act="silu")
    layers = (True,) * config.num_hidden_layers
    experts = read_experts(config, layers, "intermediate_size", normalised=True, count_field="num_local_experts")
    assert experts is not None
    return describe_common(
        config,
        names=NAMES,
        windows=read_windows(config, config.sliding_window),
        sinks=layers,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        activation=ClampedSwiGLU(
            float(positive("swiglu_alpha", config.swiglu_alpha)), float(positive("swiglu_limit", config.swiglu_limit))
        ),
        experts=replace(experts, biases=True),
    )
