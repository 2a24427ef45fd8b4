"""Mixtral (Jiang et al., 2024): Mistral with experts in all layers."""

from __future__ import annotations

from transformers import PretrainedConfig

from nanoinfer.models.description import Description, Names
from nanoinfer.models.experts import read_experts
from nanoinfer.models.reading import describe_common, same_windows

NAMES = Names(
    router="block_sparse_moe.gate",
    expert="block_sparse_moe.experts.{}",
    expert_gate="w1",
    expert_up="w3",
    expert_down="w2",
)


def describe(config: PretrainedConfig) -> Description:
    """Describe a Mixtral model: a token's weights add up to 1."""
    layers = (True,) * config.num_hidden_layers
    return describe_common(
        config,
        names=NAMES,
        windows=same_windows(config),
        experts=read_experts(config, layers, "intermediate_size", normalised=True),
    )
