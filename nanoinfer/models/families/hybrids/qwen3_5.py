"""Qwen3-Next and Qwen3.5 (Qwen Team, 2025 and 2026): most layers have the gated delta rule, the others attend.

Attention has an output gate and norms of each query and key head, and rotates a share of a head. Norms are stored less
one, but for those of the delta rule. A layer that attends predicts further tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from nanoinfer.layers.delta import GatedDelta
from nanoinfer.layers.norm import NormKind
from nanoinfer.models.description import Description
from nanoinfer.models.module_names import PredictionLayers
from nanoinfer.models.reading.experts import MoEConfig, read_experts, sparse_layers
from nanoinfer.models.reading.rope import read_rope, read_rotary_dim
from nanoinfer.models.reading.settings import count_of, refuse, size_of
from nanoinfer.models.reading.shared import describe_common, read_mixers, read_width

if TYPE_CHECKING:
    from transformers import PretrainedConfig


PREDICTION = PredictionLayers(
    0,
    "mtp.layers",
    embedding_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
    projection="mtp.fc",
    norm="mtp.norm",
)


def describe(config: PretrainedConfig) -> Description:
    """Describe a dense Qwen3.5 model."""
    return _describe(config)


def describe_moe(config: PretrainedConfig) -> Description:
    """Describe a Qwen3.5 model of experts: all layers have them, and a token's weights add up to 1."""
    layers, shared = (True,) * config.num_hidden_layers, size_of(config, "shared_expert_intermediate_size")
    return _describe(
        config, experts=read_experts(config, layers, "moe_intermediate_size", normalised=True, shared_size=shared)
    )


def describe_next(config: PretrainedConfig) -> Description:
    """Describe a Qwen3-Next model: its checkpoints hold the delta rule's projections head by head, in two tensors."""
    shared = size_of(config, "shared_expert_intermediate_size")
    experts = read_experts(config, sparse_layers(config), "moe_intermediate_size", shared_size=shared)
    return _describe(config, "heads", "num_nextn_predict_layers", 1, experts=experts)


def _describe(
    config: PretrainedConfig,
    layout: Literal["stacked", "heads"] = "stacked",
    predicting: str = "mtp_num_hidden_layers",
    usual: int = 0,
    experts: MoEConfig | None = None,
) -> Description:
    """predicting: the setting that counts layers which predict further tokens; usual: so many, if configs lack it"""
    refuse(config, hidden_act="silu", attn_output_gate=True, mtp_use_dedicated_embeddings=False)
    mixers = read_mixers(config, {"linear_attention": read_delta(config, layout=layout)})
    rope = read_rope(config, read_rotary_dim(config))
    return describe_common(
        config,
        mixers=mixers,
        ropes=tuple(rope if mixer is None else None for mixer in mixers),
        norm=NormKind(plus_one=True),
        qk_norm="head",
        output_gate=True,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        experts=experts,
        prediction=_read_prediction(config, predicting, usual, mixers.index(None), experts),
    )


def _read_prediction(
    config: PretrainedConfig, field: str, usual: int, like: int, experts: MoEConfig | None
) -> PredictionLayers | None:
    """Read the layers that predict further tokens, of which nanoinfer runs the first.

    field, usual: the setting that counts them, and how many they are without it; like: as PredictionLayers has it
    """
    count = usual if getattr(config, field, None) is None else count_of(config, field)
    if not count:
        return None
    has_experts = experts is not None and experts.layers[0]
    return replace(PREDICTION, like=like, has_experts=has_experts)


def read_delta(config: PretrainedConfig, **own: Any) -> GatedDelta:
    """Read the sizes of the layers with the gated delta rule; own: fields that no setting has"""
    delta = GatedDelta(
        key_heads=size_of(config, "linear_num_key_heads"),
        value_heads=size_of(config, "linear_num_value_heads"),
        key_dim=size_of(config, "linear_key_head_dim"),
        value_dim=size_of(config, "linear_value_head_dim"),
        width=read_width(config, "linear_conv_kernel_dim"),
        **own,
    )
    if delta.value_heads % delta.key_heads:
        raise ValueError(
            f"model: linear_num_key_heads={delta.key_heads} in its config: must be a divisor of"
            f" linear_num_value_heads={delta.value_heads}"
        )
    return delta
