"""Gemma (Gemma Team, 2024 and 2025): scaled embeddings; since Gemma 2 windows, and norms on branches' results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanoinfer.layers.norm import NormKind
from nanoinfer.models.description import Description
from nanoinfer.models.module_names import ModuleNames
from nanoinfer.models.reading.rope import read_rope
from nanoinfer.models.reading.settings import head_dim_of, positive, positive_or_none, refuse
from nanoinfer.models.reading.shared import describe_common, read_windows, refuse_windows

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAMES = ModuleNames(
    attention_norm="input_layernorm",
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)
VAULT_NAMES = ModuleNames(mlp_norm="pre_feedforward_layernorm")


def describe_gemma(config: PretrainedConfig) -> Description:
    """Describe a Gemma model of the first generation: no layer has a window."""
    refuse_windows(config)
    return _describe(config, "hidden_act")


def describe_gemma2(config: PretrainedConfig) -> Description:
    """Describe a Gemma 2 model: its scores and its logits have soft caps."""
    return _describe_capped(config, NAMES)


def describe_vaultgemma(config: PretrainedConfig) -> Description:
    """Describe a VaultGemma model (Sinha et al., 2025): Gemma 2 without norms on branches' results."""
    return _describe_capped(config, VAULT_NAMES)


def describe_gemma3(config: PretrainedConfig) -> Description:
    """Describe a Gemma 3 model: it has q/k norms by head, and other rotary settings in layers with a window.

    EmbeddingGemma's tokens see those behind them, too.
    """
    ropes = {kind: read_rope(config, head_dim_of(config), kind) for kind in set(config.layer_types)}
    own = {"ropes": tuple(ropes[kind] for kind in config.layer_types), "qk_norm": "head"}
    return _describe_windowed(config, NAMES, is_encoder=bool(config.use_bidirectional_attention), **own)


def _describe_capped(config: PretrainedConfig, names: ModuleNames) -> Description:
    score_cap = positive_or_none("attn_logit_softcapping", config.attn_logit_softcapping)
    return _describe_windowed(config, names, score_cap=score_cap)


def _describe_windowed(config: PretrainedConfig, names: ModuleNames, **own: Any) -> Description:
    return _describe(
        config,
        "hidden_activation",
        names=names,
        windows=read_windows(config, config.sliding_window),
        attention_scale=positive("query_pre_attn_scalar", config.query_pre_attn_scalar) ** -0.5,
        logit_cap=positive_or_none("final_logit_softcapping", config.final_logit_softcapping),
        **own,
    )


def _describe(config: PretrainedConfig, activation_field: str, **own: Any) -> Description:
    if "is_encoder" not in own:
        refuse(config, use_bidirectional_attention=False)
    return describe_common(
        config,
        activation_field,
        norm=NormKind(plus_one=True),
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        embedding_scale=config.hidden_size**0.5,
        **own,
    )
