"""Granite (IBM, 2024): Llama with multipliers of the embeddings, the scores, the branches' results and the logits.

The layers of GraniteMoe have experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanoinfer.models.description import Description, Names
from nanoinfer.models.experts import read_experts
from nanoinfer.models.reading import describe_common, refuse_windows
from nanoinfer.models.settings import positive

if TYPE_CHECKING:
    from transformers import PretrainedConfig


MOE_NAMES = Names(
    routers=("block_sparse_moe.router.layer", "block_sparse_moe.router"),
    expert="block_sparse_moe.experts.{}",
    expert_stacks=(
        ("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
        ("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"),
    ),
)


def describe_granite(config: PretrainedConfig) -> Description:
    """Describe a Granite model: four multipliers, and biases if the config has them."""
    return _describe(config, mlp_bias=config.mlp_bias)


def describe_moe(config: PretrainedConfig) -> Description:
    """Describe a Granite model of experts: all layers have them, and a token's weights add up to 1."""
    layers = (True,) * config.num_hidden_layers
    experts = read_experts(config, layers, "intermediate_size", normalised=True, count_field="num_local_experts")
    return _describe(config, names=MOE_NAMES, experts=experts)


def _describe(config: PretrainedConfig, **own: Any) -> Description:
    refuse_windows(config)
    return describe_common(
        config,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        embedding_scale=config.embedding_multiplier,
        attention_scale=positive("attention_multiplier", config.attention_multiplier),
        residual_scale=config.residual_multiplier,
        logit_scale=1 / positive("logits_scaling", config.logits_scaling),
        **own,
    )
