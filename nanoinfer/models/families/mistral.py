"""Mistral (Jiang et al., 2023) and Ministral 3: Llama with a window, and with queries that grow with the position."""

from __future__ import annotations

from transformers import PretrainedConfig

from nanoinfer.models.description import Description, QueryScaling
from nanoinfer.models.reading import describe_common, read_windows, same_windows
from nanoinfer.models.rope import read_original_length
from nanoinfer.models.settings import positive


def describe_mistral(config: PretrainedConfig) -> Description:
    """One window, if any, for all layers, or where there are layer_types, for those that they name.

    transformers calls the latter "ministral", whatever config.json does.
    """
    is_ministral = config.model_type == "ministral"
    return describe_common(
        config,
        windows=read_windows(config, config.sliding_window) if is_ministral else same_windows(config),
    )


def describe_ministral3(config: PretrainedConfig) -> Description:
    """Likewise, and a scale for the queries of positions beyond the original length."""
    beta = config.rope_parameters.get("llama_4_scaling_beta")
    scaling = None
    if beta != 0:
        length = read_original_length(config, config.rope_parameters)
        scaling = QueryScaling(float(positive("llama_4_scaling_beta", beta)), length)
    return describe_common(
        config,
        windows=same_windows(config),
        query_scaling=scaling,
    )
