"""HunYuan of experts, such as A13B (Tencent, 2025): the dense model's attention, and one expert for all tokens."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

from nanoinfer.models.description import Description
from nanoinfer.models.families.llama import describe_hunyuan
from nanoinfer.models.reading.experts import read_experts
from nanoinfer.models.reading.settings import of_layers

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def describe(config: PretrainedConfig) -> Description:
    """Describe a HunYuan model of experts: all layers have them, and a token's weights add up to 1."""
    dense, layers = describe_hunyuan(config), (True,) * config.num_hidden_layers
    one_count = copy(config)
    one_count.moe_topk = _used(config)
    experts = read_experts(one_count, layers, "intermediate_size", normalised=True, used_field="moe_topk")
    assert experts is not None
    names = replace(dense.names, routers=("mlp.gate.wg",), shared_experts=("mlp.shared_mlp",))
    return replace(dense, names=names, experts=replace(experts, float32_router=True, shared_size=experts.size))


def _used(config: PretrainedConfig) -> int:
    """Return how many experts a token uses: moe_topk, which may be a list of the same number for each layer."""
    if not isinstance(config.moe_topk, list):
        return config.moe_topk
    first, *others = of_layers(config, "moe_topk")
    if any(other != first for other in others):
        raise ValueError(f"model: moe_topk={config.moe_topk!r} in its config: must be the same in all layers")
    return first
