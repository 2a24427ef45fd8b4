"""DBRX (Databricks, 2024): LayerNorms without biases; queries, keys and values are clamped; all layers have experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoinfer.layers.norm import NormKind
from nanoinfer.models.description import Description
from nanoinfer.models.families.classics.spelling import spelling
from nanoinfer.models.module_names import ModuleNames
from nanoinfer.models.reading.experts import read_experts
from nanoinfer.models.reading.rope import plain_rope, read_rope
from nanoinfer.models.reading.settings import head_dim_of, positive, positive_or_none, refuse
from nanoinfer.models.reading.shared import describe_common

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}  # what transformers adds to a file without any
NAMES = ModuleNames(
    attention_norm="norm_attn_norm.norm_1",
    mlp_norm="norm_attn_norm.norm_2",
    last_norm="model.norm_f",
    qkv=("norm_attn_norm.attn.Wqkv",),
    o="norm_attn_norm.attn.out_proj",
    routers=("ffn.router.layer",),
    expert="ffn.experts.{}",
    expert_gate="w1",
    expert_up="v1",
    expert_down="w2",
    expert_stacks=(),
    flat_experts=("ffn.experts.mlp.w1", "ffn.experts.mlp.v1", "ffn.experts.mlp.w2"),
)


def describe(config: PretrainedConfig) -> Description:
    """Describe a DBRX. Its published files give the rotary base in attn_config, transformers in rope_parameters."""
    attention, ffn = config.attn_config, config.ffn_config
    refuse(ffn, ffn_act_fn={"name": "silu"}, moe_normalize_expert_weights=1.0)
    rope, own_theta = read_rope(config, head_dim_of(config)), getattr(attention, "rope_theta", None)
    if own_theta is not None and config.rope_parameters == DEFAULT_ROPE:
        rope = plain_rope(head_dim_of(config), positive("rope_theta", own_theta))
    layers, is_normalised = (True,) * config.num_hidden_layers, ffn.moe_normalize_expert_weights is not None
    how = layers, "ffn_hidden_size", is_normalised, None, "moe_num_experts", "moe_top_k"
    return describe_common(
        config,
        activation_field=None,
        names=NAMES,
        spelling=spelling(("transformer",), "wte", "blocks"),
        norm=NormKind(centred=True),
        norm_eps=1e-5,
        ropes=(rope,) * config.num_hidden_layers,
        qkv_limit=positive_or_none("clip_qkv", attention.clip_qkv),
        experts=read_experts(ffn, *how),
    )
