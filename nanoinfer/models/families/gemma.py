"""Gemma 2 and Gemma 3 (Gemma Team, 2024 and 2025): norms before and after branches, scaled embeddings, windows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanoinfer.models.description import Description, Names
from nanoinfer.models.reading import describe_common, read_windows
from nanoinfer.models.rope import read_rope
from nanoinfer.models.settings import head_dim_of, positive, positive_or_none, refuse

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAMES = Names(
    attention_norm="input_layernorm",
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)


def describe_gemma2(config: PretrainedConfig) -> Description:
    """Describe a Gemma 2 model: its scores and its logits have soft caps."""
    return _describe(
        config,
        score_cap=positive_or_none("attn_logit_softcapping", config.attn_logit_softcapping),
        logit_cap=positive_or_none("final_logit_softcapping", config.final_logit_softcapping),
    )


def describe_gemma3(config: PretrainedConfig) -> Description:
    """Describe a Gemma 3 model: it has q/k norms by head, and other rotary settings in layers with a window."""
    ropes = {kind: read_rope(config, head_dim_of(config), kind) for kind in set(config.layer_types)}
    return _describe(
        config,
        ropes=tuple(ropes[kind] for kind in config.layer_types),
        qk_norm="head",
        logit_cap=positive_or_none("final_logit_softcapping", config.final_logit_softcapping),
    )


def _describe(config: PretrainedConfig, **own: Any) -> Description:
    refuse(config, use_bidirectional_attention=False)
    return describe_common(
        config,
        activation_field="hidden_activation",
        names=NAMES,
        norm_plus_one=True,
        windows=read_windows(config, config.sliding_window),
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        attention_scale=positive("query_pre_attn_scalar", config.query_pre_attn_scalar) ** -0.5,
        embedding_scale=config.hidden_size**0.5,
        **own,
    )
