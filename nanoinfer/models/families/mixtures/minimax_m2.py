"""MiniMax-M2 (MiniMax, 2025): experts in all layers, and a q/k norm over all heads at once."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nanoinfer.models.description import Description
from nanoinfer.models.families.mistral import MIXTRAL_NAMES
from nanoinfer.models.reading.experts import read_experts
from nanoinfer.models.reading.rope import read_rope, read_rotary_dim
from nanoinfer.models.reading.shared import describe_common, refuse_windows

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAMES = replace(MIXTRAL_NAMES, corrections=("block_sparse_moe.e_score_correction_bias", "mlp.e_score_correction_bias"))


def describe(config: PretrainedConfig) -> Description:
    """Describe a MiniMax-M2 model: half of each head is rotated. Sigmoid scores, and weights that add up to 1."""
    refuse_windows(config)
    layers = (True,) * config.num_hidden_layers
    experts = read_experts(config, layers, "intermediate_size", normalised=True, count_field="num_local_experts")
    assert experts is not None
    rope = read_rope(config, read_rotary_dim(config))
    return describe_common(
        config,
        names=NAMES,
        ropes=(rope,) * config.num_hidden_layers,
        qk_norm="full",
        experts=replace(experts, routing=replace(experts.routing, scoring="sigmoid"), corrected=True),
    )
