"""LFM2 (Liquid AI, 2025): some layers attend, with norms of each query and key head; the others convolve.

LFM2 of experts has some in all but the first layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nanoinfer.layers.short_convolution import ShortConvolution
from nanoinfer.models.description import Description
from nanoinfer.models.module_names import ModuleNames
from nanoinfer.models.reading.experts import read_experts, sparse_from
from nanoinfer.models.reading.rope import read_rope
from nanoinfer.models.reading.settings import head_dim_of, positive, size_of
from nanoinfer.models.reading.shared import describe_common, read_mixers, read_width

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAMES = ModuleNames(
    attention_norm="operator_norm",
    mlp_norm="ffn_norm",
    last_norm="model.embedding_norm",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    o="self_attn.out_proj",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    routers=("feed_forward.gate",),
    corrections=("feed_forward.expert_bias",),
    expert="feed_forward.experts.{}",
    expert_gate="w1",
    expert_up="w3",
    expert_down="w2",
    expert_stacks=(("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),),
)


def describe(config: PretrainedConfig) -> Description:
    """Describe an LFM2 model."""
    return _describe(config, intermediate_size=_read_intermediate_size(config))


def describe_moe(config: PretrainedConfig) -> Description:
    """Describe an LFM2 model of experts: sigmoid scores, and a correction if the config has one."""
    experts = read_experts(config, sparse_from(config, "num_dense_layers"), "moe_intermediate_size")
    if experts is not None:
        scale = float(positive("routed_scaling_factor", config.routed_scaling_factor))
        routing = replace(experts.routing, scoring="sigmoid", epsilon=1e-6, scale=scale)
        experts = replace(experts, routing=routing, corrected=bool(config.use_expert_bias))
    return _describe(config, experts=experts)


def _describe(config: PretrainedConfig, **own: Any) -> Description:
    """layer_types says "conv" for layers that convolve."""
    convolution = ShortConvolution(config.hidden_size, read_width(config, "conv_L_cache"), bool(config.conv_bias))
    mixers = read_mixers(config, {"conv": convolution})
    rope = read_rope(config, head_dim_of(config))
    return describe_common(
        config,
        activation_field=None,
        eps_field="norm_eps",
        names=NAMES,
        mixers=mixers,
        ropes=tuple(rope if mixer is None else None for mixer in mixers),
        qk_norm="head",
        **own,
    )


def _read_intermediate_size(config: PretrainedConfig) -> int:
    """Return the MLP's size: intermediate_size, or if the config adjusts it, two thirds, scaled and rounded up."""
    size: int = config.intermediate_size
    if not config.block_auto_adjust_ff_dim:
        return size
    size = 2 * size // 3
    if config.block_ffn_dim_multiplier is not None:
        unit = size_of(config, "block_multiple_of")
        size = int(positive("block_ffn_dim_multiplier", config.block_ffn_dim_multiplier) * size)
        size = -(-size // unit) * unit
    return size
