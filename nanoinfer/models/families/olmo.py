"""OLMo 2 and 3 (OLMo Team, 2025): norms on branches' results; a q/k norm over all heads at once.

The layers of OLMoE and FlexOlmo have experts; most of OLMo Hybrid's have the gated delta rule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanoinfer.layers.norm import NormKind
from nanoinfer.models.description import Description
from nanoinfer.models.families.hybrids.qwen3_5 import read_delta
from nanoinfer.models.module_names import ModuleNames
from nanoinfer.models.reading.experts import read_experts
from nanoinfer.models.reading.rope import read_max_position, read_rope
from nanoinfer.models.reading.settings import head_dim_of, positive_or_none, refuse, size_of
from nanoinfer.models.reading.shared import describe_common, read_mixers, read_windows, refuse_windows
from nanoinfer.weights.names import Spelling

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAMES = ModuleNames(
    attention_norm=None,
    attention_post_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_post_norm="post_feedforward_layernorm",
)
HYBRID_SPELLING = Spelling(
    parts=(
        (".attention_layer_norm.", ".input_layernorm."),
        (".feedforward_layer_norm.", ".post_attention_layernorm."),
    )
)


def describe_olmo(config: PretrainedConfig) -> Description:
    """Describe an OLMo model (Groeneveld et al., 2024): LayerNorms without weights; heads may be clamped."""
    refuse_windows(config)
    return describe_common(
        config,
        norm=NormKind(centred=True, has_weight=False),
        norm_eps=1e-5,
        qkv_limit=positive_or_none("clip_qkv", config.clip_qkv),
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
    )


def describe_olmo2(config: PretrainedConfig) -> Description:
    """Describe an OLMo 2 model: no layer has a window."""
    refuse_windows(config)
    return _describe(config)


def describe_olmo3(config: PretrainedConfig) -> Description:
    """Describe an OLMo 3 model: most layers have a window, and layers with one have other rotary settings."""
    ropes = {kind: read_rope(config, head_dim_of(config), kind) for kind in set(config.layer_types)}
    return _describe(
        config,
        windows=read_windows(config, config.sliding_window),
        ropes=tuple(ropes[kind] for kind in config.layer_types),
    )


def describe_olmoe(config: PretrainedConfig) -> Description:
    """Describe an OLMoE model (Muennighoff et al., 2024): norms on branches' inputs, and experts in all layers."""
    refuse(config, clip_qkv=None)
    return describe_common(
        config,
        qk_norm="full",
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        experts=read_experts(config, (True,) * config.num_hidden_layers, "intermediate_size"),
    )


def describe_flex_olmo(config: PretrainedConfig) -> Description:
    """Describe a FlexOlmo model (Shi et al., 2025): OLMo 2 with experts in all layers."""
    refuse_windows(config)
    return _describe(config, experts=read_experts(config, (True,) * config.num_hidden_layers, "intermediate_size"))


def describe_hybrid(config: PretrainedConfig) -> Description:
    """Describe an OLMo Hybrid model (2026): OLMo 2's layers attend, and the others have norms on branches' inputs."""
    refuse(config, hidden_act="silu")
    largest = 2.0 if config.linear_allow_neg_eigval else 1.0
    delta = read_delta(config, layout="apart", largest=largest, norm_eps=1e-5)
    mixers = read_mixers(config, {"linear_attention": delta})
    turns = config.rope_parameters is not None and config.rope_parameters.get("rope_theta") is not None
    rope = read_rope(config, head_dim_of(config)) if turns else None
    return _describe(
        config,
        layer_names=tuple(NAMES if mixer is None else ModuleNames() for mixer in mixers),
        spelling=HYBRID_SPELLING,
        mixers=mixers,
        ropes=tuple(rope if mixer is None else None for mixer in mixers),
        max_position=read_max_position(config) if turns else size_of(config, "max_position_embeddings"),
    )


def _describe(config: PretrainedConfig, **own: Any) -> Description:
    return describe_common(
        config, names=NAMES, qk_norm="full", qkv_bias=config.attention_bias, o_bias=config.attention_bias, **own
    )
