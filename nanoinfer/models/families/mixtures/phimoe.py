"""Phi-3.5-MoE (Abdin et al., 2024): Mixtral with LayerNorms, and routers of SparseMixer (Liu et al., 2024)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nanoinfer.layers.norm import NormKind
from nanoinfer.layers.rotary import Rope
from nanoinfer.models.description import Description
from nanoinfer.models.families.mistral import MIXTRAL_NAMES
from nanoinfer.models.reading.experts import MoEConfig, read_experts
from nanoinfer.models.reading.rope import read_rope
from nanoinfer.models.reading.settings import head_dim_of, positive, refuse
from nanoinfer.models.reading.shared import describe_common, same_windows

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAMES = replace(MIXTRAL_NAMES, routers=("block_sparse_moe.gate", "mlp.router"))


def describe(config: PretrainedConfig) -> Description:
    """Describe a Phi-3.5-MoE. A sequence ends where the rotation would be stretched.

    Beyond, the model's authors divide the frequencies by long_factor, and transformers 5.24 by short_factor.
    """
    refuse(config, num_experts_per_tok=2)
    if config.tie_word_embeddings:
        refuse(config, lm_head_bias=False)
    rope = read_rope(config, head_dim_of(config), types=("default", "longrope"))
    longest = rope.long_from or config.max_position_embeddings
    return describe_common(
        config,
        names=NAMES,
        norm=NormKind(centred=True, has_bias=True),
        windows=same_windows(config),
        ropes=(_short(config, rope),) * config.num_hidden_layers,
        max_position=min(longest, config.max_position_embeddings),
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        head_bias=config.lm_head_bias,
        experts=_read_experts(config),
    )


def _short(config: PretrainedConfig, rope: Rope) -> Rope:
    """Return the rotation of sequences that nothing stretches: short_mscale is its factor."""
    if rope.long_from is None:
        return rope
    factor = positive("short_mscale", config.rope_parameters.get("short_mscale"))
    return replace(rope, factor=float(factor), long_frequencies=None, long_from=None)


def _read_experts(config: PretrainedConfig) -> MoEConfig:
    layers = (True,) * config.num_hidden_layers
    experts = read_experts(config, layers, "intermediate_size", normalised=False, count_field="num_local_experts")
    assert experts is not None
    nearness = 2 * float(positive("router_jitter_noise", config.router_jitter_noise))
    return replace(experts, routing=replace(experts.routing, scoring="sparsemixer", nearness=nearness))
