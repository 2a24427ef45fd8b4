"""Hy3 (Tencent, 2026): norms of each query and key head; most layers have experts, one of them for all tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoinfer.models.description import Description
from nanoinfer.models.module_names import ModuleNames
from nanoinfer.models.reading.experts import listed_layers, read_corrected_experts
from nanoinfer.models.reading.shared import describe_common, guessing_layers, refuse_windows

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAMES = ModuleNames(
    routers=("mlp.router.gate", "mlp.gate"),
    corrections=("mlp.expert_bias", "mlp.e_score_correction_bias"),
    shared_experts=("mlp.shared_mlp", "mlp.shared_experts"),
)


def describe(config: PretrainedConfig) -> Description:
    """Describe a Hy3 model: a token's weights add up to router_scaling_factor.

    enable_moe_fp32_combine changes no number: a sum of two in 16 bits is computed in float32 and rounded anyway.
    """
    refuse_windows(config)
    return describe_common(
        config,
        names=NAMES,
        qk_norm="head",
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        experts=read_corrected_experts(
            config, listed_layers(config), "num_experts", "num_shared_experts", "router_scaling_factor", normalised=True
        ),
        skipped=guessing_layers(config, 1),
    )
