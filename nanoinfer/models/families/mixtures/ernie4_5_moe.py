"""ERNIE 4.5 of experts (Baidu, 2025): the choice is by softmax scores and a correction."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nanoinfer.models.description import Description
from nanoinfer.models.module_names import ModuleNames
from nanoinfer.models.reading.experts import MoEConfig, read_experts
from nanoinfer.models.reading.rope import read_rope
from nanoinfer.models.reading.settings import count_of, head_dim_of, positive, refuse, size_of
from nanoinfer.models.reading.shared import describe_common, refuse_windows

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CORRECTION = "moe_statics.e_score_correction_bias"
NAMES = ModuleNames(
    corrections=(f"mlp.{CORRECTION}", f"mlp.gate.{CORRECTION}"),
    correction_is_row=True,
    shared_experts=("mlp.shared_experts",),
)


def describe(config: PretrainedConfig) -> Description:
    """Describe an ERNIE 4.5 model of experts: heads are rotated in pairs of neighbours."""
    refuse_windows(config)
    refuse(config, use_bias=False)
    rope = read_rope(config, head_dim_of(config), interleaved=True)
    return describe_common(
        config,
        names=NAMES,
        ropes=(rope,) * config.num_hidden_layers,
        experts=_read_experts(config),
    )


def _read_experts(config: PretrainedConfig) -> MoEConfig | None:
    step = size_of(config, "moe_layer_interval")
    first, last = count_of(config, "moe_layer_start_index"), count_of(config, "moe_layer_end_index")
    layers = tuple((layer + 1) % step == 0 and first <= layer <= last for layer in range(config.num_hidden_layers))
    experts = read_experts(config, layers, "moe_intermediate_size", normalised=True, count_field="moe_num_experts")
    if experts is None:
        return None
    shared = size_of(config, "moe_num_shared_experts") if config.moe_num_shared_experts else None
    return replace(
        experts,
        routing=replace(experts.routing, least_sum=float(positive("moe_norm_min", config.moe_norm_min))),
        corrected=True,
        float32_router=True,
        shared_size=shared and shared * experts.size,
    )
