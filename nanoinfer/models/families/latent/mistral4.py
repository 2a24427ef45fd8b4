"""Mistral Small 4 (Mistral AI, 2026): DeepSeek's attention, larger queries beyond the original length, and experts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nanoinfer.models.description import Description
from nanoinfer.models.families.latent.deepseek import NAMES
from nanoinfer.models.families.mistral import read_query_scaling
from nanoinfer.models.reading.experts import read_groups, read_shared_experts, sparse_from
from nanoinfer.models.reading.latent import describe_latent

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def describe(config: PretrainedConfig) -> Description:
    """Describe a Mistral Small 4: a router's scores are those of softmax, in the model's dtype."""
    experts = read_shared_experts(config, sparse_from(config, "first_k_dense_replace"))
    if experts is not None:
        routing = read_groups(config, experts.count, replace(experts.routing, epsilon=1e-20))
        experts = replace(experts, routing=routing)
    return describe_latent(
        config,
        bool(config.rope_interleave),
        names=NAMES,
        o_bias=config.attention_bias,
        query_scaling=read_query_scaling(config),
        experts=experts,
    )
