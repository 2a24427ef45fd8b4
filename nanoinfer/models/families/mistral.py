"""Mistral (Jiang et al., 2023): Llama with a window.

The queries of Ministral 3 also grow with the position, and the layers of Mixtral have experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoinfer.models.attention.heads import QueryScaling
from nanoinfer.models.description import Description
from nanoinfer.models.module_names import ModuleNames
from nanoinfer.models.reading.experts import read_experts
from nanoinfer.models.reading.rope import read_original_length
from nanoinfer.models.reading.settings import positive
from nanoinfer.models.reading.shared import describe_common, read_windows, same_windows

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MIXTRAL_NAMES = ModuleNames(
    routers=("block_sparse_moe.gate", "mlp.gate"),
    expert="block_sparse_moe.experts.{}",
    expert_gate="w1",
    expert_up="w3",
    expert_down="w2",
)


def describe_mistral(config: PretrainedConfig) -> Description:
    """Describe a Mistral model: all layers have the window, if any, or only those that layer_types names.

    If the config has layer_types, transformers sets its model_type to "ministral", whatever config.json says.
    """
    is_ministral = config.model_type == "ministral"
    return describe_common(
        config,
        windows=read_windows(config, config.sliding_window) if is_ministral else same_windows(config),
    )


def describe_ministral3(config: PretrainedConfig) -> Description:
    """Describe a Ministral 3 model: a window, if any, on all layers, and larger queries beyond the original length."""
    return describe_common(
        config,
        windows=same_windows(config),
        query_scaling=read_query_scaling(config),
    )


def read_query_scaling(config: PretrainedConfig) -> QueryScaling | None:
    """Return how queries beyond the original length are enlarged; None: not at all."""
    beta = config.rope_parameters.get("llama_4_scaling_beta")
    if beta == 0:
        return None
    length = read_original_length(config, config.rope_parameters)
    return QueryScaling(float(positive("llama_4_scaling_beta", beta)), length)


def describe_mixtral(config: PretrainedConfig) -> Description:
    """Describe a Mixtral model (Jiang et al., 2024): experts in all layers; a token's weights add up to 1."""
    layers = (True,) * config.num_hidden_layers
    return describe_common(
        config,
        names=MIXTRAL_NAMES,
        windows=same_windows(config),
        experts=read_experts(config, layers, "intermediate_size", normalised=True),
    )
