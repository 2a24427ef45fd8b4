"""DeepSeek-V2 and V3, R1 and V3.1 (DeepSeek-AI, 2024 and 2025), Kimi K2 (Moonshot AI, 2025), Youtu (Tencent, 2025).

The first layers are dense, and the others have experts, some of them for all tokens. Youtu's layers are all dense.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nanoinfer.models.description import Description
from nanoinfer.models.module_names import ModuleNames
from nanoinfer.models.reading.experts import (
    MoEConfig,
    read_corrected_experts,
    read_groups,
    read_shared_experts,
    sparse_from,
)
from nanoinfer.models.reading.latent import describe_latent
from nanoinfer.models.reading.settings import count_of, refuse
from nanoinfer.models.reading.shared import predicting_layers

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAMES = ModuleNames(shared_experts=("mlp.shared_experts",))
METHODS = "greedy", "group_limited_greedy"


def describe_v2(config: PretrainedConfig) -> Description:
    """Describe a DeepSeek-V2: a router's scores are those of softmax, and its weights do not add up to 1."""
    refuse(config, norm_topk_prob=False)
    experts = _read_v2_experts(config)
    return describe_latent(
        config, True, names=NAMES, o_bias=config.attention_bias, mlp_bias=config.mlp_bias, experts=experts
    )


def describe_v3(config: PretrainedConfig) -> Description:
    """Describe a DeepSeek-V3, or a Kimi K2."""
    return describe_corrected(config, sparse_from(config, "first_k_dense_replace"))


def describe_corrected(config: PretrainedConfig, sparse: tuple[bool, ...]) -> Description:
    """Describe a model whose routers correct their scores for the choice; sparse: which layers have experts."""
    guesses = getattr(config, "num_nextn_predict_layers", None)
    return describe_latent(
        config,
        bool(config.rope_interleave),
        names=NAMES,
        o_bias=config.attention_bias,
        experts=read_corrected_experts(config, sparse),
        **predicting_layers(config, guesses and count_of(config, "num_nextn_predict_layers")),
    )


def describe_youtu(config: PretrainedConfig) -> Description:
    """Describe a Youtu: no layer has experts."""
    return describe_latent(config, bool(config.rope_interleave), o_bias=config.attention_bias)


def _read_v2_experts(config: PretrainedConfig) -> MoEConfig | None:
    if config.topk_method not in METHODS:
        raise ValueError(
            f"model: topk_method={config.topk_method!r} in its config is not supported; supported: {', '.join(METHODS)}"
        )
    experts = read_shared_experts(config, sparse_from(config, "first_k_dense_replace"), normalised=False)
    if experts is None:
        return None
    routing = experts.routing
    if config.topk_method != "greedy":
        routing = replace(read_groups(config, experts.count, routing), by_largest=True)
    return replace(experts, routing=routing, float32_router=True)
