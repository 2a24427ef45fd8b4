"""Llama (Touvron et al., 2023; Llama Team, 2024), the many models that use its class, and some that differ little."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nanoinfer.layers.norm import NormKind
from nanoinfer.models.description import Description
from nanoinfer.models.module_names import ModuleNames
from nanoinfer.models.reading.rope import read_rope
from nanoinfer.models.reading.settings import head_dim_of, of_layers, positive_or_none
from nanoinfer.models.reading.shared import describe_common, read_windows, refuse_windows

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def describe_llama(config: PretrainedConfig) -> Description:
    """Describe a Llama model: norms before the branches, and biases if the config has them."""
    refuse_windows(config)
    return describe_common(
        config,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )


def describe_seed_oss(config: PretrainedConfig) -> Description:
    """Describe a Seed-OSS model (ByteDance Seed, 2025): the output projection's bias has a setting of its own."""
    refuse_windows(config)
    return describe_common(
        config,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_out_bias,
        mlp_bias=config.mlp_bias,
    )


def describe_helium(config: PretrainedConfig) -> Description:
    """Describe a Helium model (Kyutai, 2025): heads are rotated in pairs of neighbours; o has no bias."""
    return _in_pairs(config, qkv_bias=config.attention_bias, mlp_bias=config.mlp_bias)


def describe_ernie4_5(config: PretrainedConfig) -> Description:
    """Describe a dense ERNIE 4.5 model (Baidu, 2025): heads are rotated in pairs of neighbours."""
    return _in_pairs(config, qkv_bias=config.use_bias, o_bias=config.use_bias, mlp_bias=config.use_bias)


def describe_paddleocr(config: PretrainedConfig) -> Description:
    """Describe the text part of PaddleOCR-VL (Baidu, 2025): an ERNIE 4.5 whose heads are rotated in halves."""
    return describe_common(config, qkv_bias=config.use_bias, o_bias=config.use_bias, mlp_bias=config.use_bias)


def _in_pairs(config: PretrainedConfig, **biases: Any) -> Description:
    """Describe a model whose heads are rotated in pairs of neighbours, in all layers alike."""
    refuse_windows(config)
    rope = read_rope(config, head_dim_of(config), interleaved=True)
    return describe_common(config, ropes=(rope,) * config.num_hidden_layers, **biases)


def describe_arcee(config: PretrainedConfig) -> Description:
    """Describe an Arcee model (Arcee AI, 2025): an MLP without gates."""
    refuse_windows(config)
    return describe_common(
        config,
        names=ModuleNames(gate_up=("mlp.up_proj",)),
        is_gated=False,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )


def describe_nanochat(config: PretrainedConfig) -> Description:
    """Describe a nanochat model (Karpathy, 2025): norms without weights, and heads that turn the other way round."""
    rope = read_rope(config, head_dim_of(config))
    rope = replace(rope, frequencies=tuple(-frequency for frequency in rope.frequencies))
    return describe_common(
        config,
        names=ModuleNames(gate_up=("mlp.fc1",), down="mlp.fc2"),
        norm=NormKind(has_weight=False),
        embedding_norm="model.norm",
        is_gated=False,
        qk_norm="head",
        ropes=(rope,) * config.num_hidden_layers,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        logit_cap=positive_or_none("final_logit_softcapping", config.final_logit_softcapping),
    )


def describe_hunyuan(config: PretrainedConfig) -> Description:
    """Describe a dense HunYuan model (Tencent, 2025): queries and keys are normalised behind their rotation."""
    rope = read_rope(config, head_dim_of(config), types=("default", "linear", "dynamic"))
    return describe_common(
        config,
        names=ModuleNames(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm"),
        qk_norm="rotated",
        ropes=(rope,) * config.num_hidden_layers,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
    )


def describe_cwm(config: PretrainedConfig) -> Description:
    """Describe a Code World Model (FAIR CodeGen Team, 2025): the layers that layer_types names have a window."""
    return describe_common(
        config,
        windows=read_windows(config, config.sliding_window),
        mlp_bias=config.mlp_bias,
    )


def describe_smollm3(config: PretrainedConfig) -> Description:
    """Describe a SmolLM3 model (Hugging Face, 2025): no_rope_layers has a 0 for each layer that does not rotate."""
    rope = read_rope(config, head_dim_of(config))
    return describe_common(
        config,
        windows=read_windows(config, config.sliding_window),
        ropes=tuple(rope if rotates else None for rotates in of_layers(config, "no_rope_layers")),
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )
