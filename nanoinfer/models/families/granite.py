"""Granite (IBM, 2024): Llama with multipliers of the embeddings, the scores, the branches' results and the logits.

The layers of GraniteMoe have experts, those of GraniteMoeShared (IBM, 2025) one more that every token uses. Those of
GraniteSWA (IBM, 2026), with experts or without, have sinks and windows. HyperCLOVA X (NAVER, 2025) has its multipliers.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nanoinfer.checks import as_int
from nanoinfer.layers.rotary import Rope
from nanoinfer.models.description import Description
from nanoinfer.models.module_names import ModuleNames
from nanoinfer.models.reading.experts import MoEConfig, read_experts
from nanoinfer.models.reading.rope import read_rope
from nanoinfer.models.reading.settings import head_dim_of, of_layers, positive, refuse, size_of
from nanoinfer.models.reading.shared import describe_common, read_windows

if TYPE_CHECKING:
    from transformers import PretrainedConfig


MOE_NAMES = ModuleNames(
    routers=("block_sparse_moe.router.layer", "block_sparse_moe.router"),
    expert="block_sparse_moe.experts.{}",
    expert_stacks=(
        ("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
        ("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"),
    ),
)


SHARED_NAMES = replace(MOE_NAMES, shared_experts=("shared_mlp",), shared_projections=("input_linear", "output_linear"))


def describe_granite(config: PretrainedConfig) -> Description:
    """Describe a Granite model: four multipliers, and biases if the config has them."""
    return _describe(config, mlp_bias=config.mlp_bias)


def describe_moe(config: PretrainedConfig) -> Description:
    """Describe a Granite model of experts: all layers have them, and a token's weights add up to 1."""
    return _describe(config, names=MOE_NAMES, experts=read_moe(config))


def describe_moe_shared(config: PretrainedConfig) -> Description:
    """Describe a GraniteMoeShared model: each layer has one more expert, which every token uses, if it has a size."""
    experts = read_moe(config)
    if experts is None or as_int(config.shared_intermediate_size) == 0:
        return describe_moe(config)
    experts = replace(experts, shared_size=size_of(config, "shared_intermediate_size"))
    return _describe(config, names=SHARED_NAMES, experts=experts)


def describe_hyperclovax(config: PretrainedConfig) -> Description:
    """Describe a HyperCLOVA X model: its logits are multiplied, and its branches' results may have norms."""
    names = ModuleNames()
    if config.use_post_norm:
        if config.residual_multiplier != 1:
            raise ValueError(
                f"model: residual_multiplier={config.residual_multiplier!r} in its config: must be 1 with"
                " use_post_norm=True, whose norms come before it"
            )
        names = ModuleNames(attention_post_norm="post_norm1", mlp_post_norm="post_norm2")
    scale = positive("logits_scaling", config.logits_scaling)
    return _describe(config, names=names, mlp_bias=config.mlp_bias, logit_scale=scale)


def describe_swa(config: PretrainedConfig) -> Description:
    """Describe a GraniteSWA model: a Granite model with sinks and windows."""
    return _describe(config, config.sliding_window, mlp_bias=config.mlp_bias, **_read_swa(config))


def describe_moe_swa(config: PretrainedConfig) -> Description:
    """Describe a GraniteSWA model of experts, none of them shared."""
    refuse(config, shared_intermediate_size=0)
    own = {"names": MOE_NAMES, "experts": read_moe(config), **_read_swa(config)}
    return _describe(config, config.sliding_window, **own)


def read_moe(config: PretrainedConfig) -> MoEConfig | None:
    """Read the experts of all layers; a token's weights add up to 1."""
    layers = (True,) * config.num_hidden_layers
    return read_experts(config, layers, "intermediate_size", normalised=True, count_field="num_local_experts")


def _read_swa(config: PretrainedConfig) -> dict[str, Any]:
    """Read what GraniteSWA has beside windows: layer_rope_theta has a base for each layer, or 0: it does not rotate."""
    thetas = of_layers(config, "layer_rope_theta")
    ropes = {theta: _read_rope(config, theta) for theta in set(thetas) if theta}
    return {"sinks": (True,) * len(thetas), "ropes": tuple(ropes.get(theta) for theta in thetas)}


def _read_rope(config: PretrainedConfig, theta: float) -> Rope:
    own = copy(config)
    own.rope_parameters = {**config.rope_parameters, "rope_theta": theta}
    return read_rope(own, head_dim_of(config))


def _describe(config: PretrainedConfig, window: int | None = None, **own: Any) -> Description:
    return describe_common(config, **({"windows": read_windows(config, window), **read_multipliers(config)} | own))


def read_multipliers(config: PretrainedConfig) -> dict[str, Any]:
    """Read the four multipliers, and whether attention has biases, as fields of a Description."""
    return {
        "qkv_bias": config.attention_bias,
        "o_bias": config.attention_bias,
        "embedding_scale": positive("embedding_multiplier", config.embedding_multiplier),
        "scales_given": True,
        "attention_scale": positive("attention_multiplier", config.attention_multiplier),
        "residual_scale": positive("residual_multiplier", config.residual_multiplier),
        "logit_scale": 1 / positive("logits_scaling", config.logits_scaling),
    }
