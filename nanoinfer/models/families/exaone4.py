"""EXAONE 4 (LG AI Research, 2025): norms on branches' results, a q/k norm by head, layers without rotation.

K-EXAONE has norms on branches' inputs, and experts. Kolibri has norms on both, and experts in all layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nanoinfer.models.description import Description
from nanoinfer.models.module_names import ModuleNames
from nanoinfer.models.reading.experts import listed_layers, read_corrected_experts, read_experts
from nanoinfer.models.reading.rope import read_rope
from nanoinfer.models.reading.settings import head_dim_of, size_of
from nanoinfer.models.reading.shared import describe_common, read_windows
from nanoinfer.weights.names import Spelling

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAMES = ModuleNames(
    attention_norm=None,
    attention_post_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_post_norm="post_feedforward_layernorm",
)


MOE_NAMES = ModuleNames(
    corrections=("mlp.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
    shared_experts=("mlp.shared_experts",),
)


KOLIBRI_NAMES = ModuleNames(
    attention_post_norm="post_attn_norm",
    mlp_post_norm="post_ffn_norm",
    corrections=("moe.router.expert_bias", "mlp.gate.e_score_correction_bias"),
    shared_experts=("mlp.shared_experts",),
)
KOLIBRI_SPELLING = Spelling(
    parts=((".post_self_attn_layernorm.", ".post_attn_norm."), (".post_mlp_layernorm.", ".post_ffn_norm."))
)  # transformers' modules and files


def describe(config: PretrainedConfig) -> Description:
    """Describe an EXAONE 4 model."""
    return _describe(config, names=NAMES)


def describe_moe(config: PretrainedConfig) -> Description:
    """Describe a K-EXAONE model (LG AI Research, 2026): the first layers are dense."""
    experts = read_corrected_experts(config, listed_layers(config), "num_experts", "num_shared_experts")
    return _describe(config, names=MOE_NAMES, experts=experts)


def describe_kolibri(config: PretrainedConfig) -> Description:
    """Describe a Kolibri model (Aleph Alpha, 2026): routers correct logits, and the sigmoids of the chosen weigh."""
    layers = (True,) * config.num_hidden_layers
    experts = read_experts(config, layers, "moe_intermediate_size")
    assert experts is not None
    experts = replace(
        experts,
        routing=replace(experts.routing, scoring="sigmoid", corrects_logits=True),
        corrected=True,
        float32_router=True,
        shared_size=size_of(config, "shared_expert_intermediate_size"),
    )
    return _describe(config, names=KOLIBRI_NAMES, spelling=KOLIBRI_SPELLING, experts=experts)


def _describe(config: PretrainedConfig, **own: Any) -> Description:
    """With a sliding_window, the layers that see all tokens do not rotate."""
    windows = read_windows(config, config.sliding_window)
    rope = read_rope(config, head_dim_of(config))
    rotates = [window is not None or config.sliding_window is None for window in windows]
    return describe_common(
        config,
        windows=windows,
        ropes=tuple(rope if is_rotated else None for is_rotated in rotates),
        qk_norm="head",
        **own,
    )
