"""Muse Glimmer (Meta, 2026), whose text part nanoinfer runs: norms of embeddings, queries and keys have no weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoinfer.layers.norm import RMS_NORM, NormKind
from nanoinfer.models.description import Description
from nanoinfer.models.module_names import ModuleNames
from nanoinfer.models.reading.rope import read_rope
from nanoinfer.models.reading.settings import head_dim_of, of_layers, positive, refuse
from nanoinfer.models.reading.shared import describe_common, read_windows

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAMES = ModuleNames(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
    output_gate="self_attn.gate_proj",
)


def describe(config: PretrainedConfig) -> Description:
    """Describe the text part. Layers whose layer_rope_theta is 0 do not rotate; the others all have the same base."""
    refuse(config, attention_bias=False)
    head_dim = head_dim_of(config)
    rope = read_rope(config, head_dim)
    return describe_common(
        config,
        "hidden_activation",
        names=NAMES,
        norm=NormKind(plus_one=True),
        inner_norm=NormKind(has_weight=False),
        last_norm=RMS_NORM,
        post_norm_eps=positive("post_norm_eps", config.post_norm_eps),
        embedding_norm="model.embed_norm",
        given_normalised=True,
        qk_norm="head",
        attention_scale=positive("qk_scale_factor", config.qk_scale_factor) * head_dim**-0.5,
        windows=read_windows(config, config.sliding_window),
        ropes=tuple(rope if theta else None for theta in of_layers(config, "layer_rope_theta")),
        output_gate=True,
        logit_scale=positive("output_multiplier", config.output_multiplier),
        logit_cap=positive("final_logit_softcapping", config.final_logit_softcapping),
    )
