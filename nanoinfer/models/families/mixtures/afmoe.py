"""Trinity (Arcee AI, 2025): Gemma-like norms, windows, and an output gate with a projection of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nanoinfer.models.description import Description
from nanoinfer.models.module_names import ModuleNames
from nanoinfer.models.reading.experts import read_corrected_experts, sparse_from
from nanoinfer.models.reading.rope import read_rope
from nanoinfer.models.reading.settings import head_dim_of, positive, refuse
from nanoinfer.models.reading.shared import describe_common, read_windows

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAMES = ModuleNames(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_mlp_layernorm",
    mlp_post_norm="post_mlp_layernorm",
    output_gate="self_attn.gate_proj",
    routers=("mlp.router.gate",),
    corrections=("mlp.expert_bias",),
    shared_experts=("mlp.shared_experts",),
)


def describe(config: PretrainedConfig) -> Description:
    """Describe an AFMoE model: the layers without a window do not rotate, and a muP model scales its embeddings."""
    refuse(config, attention_bias=False)  # the gate would have none
    windows = read_windows(config, positive("sliding_window", config.sliding_window))
    rope = read_rope(config, head_dim_of(config))
    layers = sparse_from(config, "num_dense_layers")
    experts = read_corrected_experts(
        config, layers, "num_experts", "num_shared_experts", "route_scale", normalised=True
    )
    return describe_common(
        config,
        names=NAMES,
        windows=windows,
        ropes=tuple(rope if window else None for window in windows),
        qk_norm="head",
        output_gate=True,
        embedding_scale=config.hidden_size**0.5 if config.mup_enabled else 1.0,
        scales_given=True,
        experts=experts and replace(experts, float32_router=False),
    )
