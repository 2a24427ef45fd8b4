"""Gemma 4 (Gemma Team, 2026): larger heads in layers without a window, normalised values, a scale behind each layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nanoinfer.layers.experts_beside_mlp import BesideMLP
from nanoinfer.models.description import Description, Experts, KVHeads
from nanoinfer.models.experts import read_experts
from nanoinfer.models.families.gemma import gemma
from nanoinfer.models.reading import describe_common, read_windows
from nanoinfer.models.rope import read_rope
from nanoinfer.models.settings import head_dim_of, kv_count_of, of_layers, positive_or_none, refuse

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAMES = replace(
    gemma.NAMES,
    layer_scale="layer_scalar",
    routers=("router.proj",),
    expert="experts.{}",
    expert_stacks=(("experts.gate_up_proj", "experts.down_proj"),),
)
BESIDE = BesideMLP(
    mlp_post_norm="post_feedforward_layernorm_1",
    experts_norm="pre_feedforward_layernorm_2",
    experts_post_norm="post_feedforward_layernorm_2",
    router_scale="router.scale",
    expert_scales="router.per_expert_scale",
)
ROPES = ("default", "proportional")


def describe(config: PretrainedConfig) -> Description:
    """Describe a Gemma 4 model, with experts or without."""
    if config.use_bidirectional_attention != "vision":  # text does not notice it
        refuse(config, use_bidirectional_attention=None)
    refuse(config, hidden_size_per_layer_input=0, num_kv_shared_layers=0)
    windows = read_windows(config, config.sliding_window)
    kinds = of_layers(config, "layer_types")
    of_kind = {kind: config.per_layer_config[kind] for kind in kinds}
    ropes = {kind: read_rope(own, head_dim_of(own), kind, ROPES) for kind, own in of_kind.items()}
    heads = {kind: _read_heads(own, kind) for kind, own in of_kind.items()}
    return describe_common(
        of_kind[kinds[0]],
        "hidden_activation",
        names=NAMES,
        windows=windows,
        ropes=tuple(ropes[kind] for kind in kinds),
        kv_heads=tuple(heads[kind] for kind in kinds),
        qk_norm="head",
        value_norm=True,
        attention_scale=1.0,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        embedding_scale=config.hidden_size**0.5,
        experts=_read_experts(config),
        logit_cap=positive_or_none("final_logit_softcapping", config.final_logit_softcapping),
    )


def _read_heads(config: PretrainedConfig, kind: str) -> KVHeads:
    """Read the heads of the layers of one kind; config: as it holds for these."""
    return KVHeads(kv_count_of(config), head_dim_of(config), config.attention_k_eq_v and kind == "full_attention")


def _read_experts(config: PretrainedConfig) -> Experts | None:
    if not getattr(config, "enable_moe_block", False):
        return None
    layers = (True,) * config.num_hidden_layers
    experts = read_experts(config, layers, "moe_intermediate_size", normalised=True, used_field="top_k_experts")
    return None if experts is None else replace(experts, beside=BESIDE)
