"""LongCat-Flash (Meituan, 2025): layers of two halves, with experts beside both. Some choices stand for no expert."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from nanoinfer.models.description import Description
from nanoinfer.models.module_names import ModuleNames
from nanoinfer.models.reading.experts import MoEConfig, read_experts
from nanoinfer.models.reading.latent import describe_latent
from nanoinfer.models.reading.settings import count_of, positive, refuse, size_of
from nanoinfer.weights.names import AS_STORED, Spelling

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def describe(config: PretrainedConfig) -> Description:
    """Describe a LongCat-Flash: factors of queries, and of latents, make up for their sizes."""
    refuse(config, mla_scale_q_lora=True, mla_scale_kv_lora=True, attention_method="MLA", zero_expert_type="identity")
    hidden, query_latent = config.hidden_size, size_of(config, "q_lora_rank")
    experts = _read_experts(config)
    model = describe_latent(
        config,
        True,
        names=_names_of(0),
        layer_names=(_names_of(0), _names_of(1)) * config.num_layers,
        o_bias=config.attention_bias,
        experts=experts,
        skipped=("model.mtp.",),
        spelling=_spelling(experts),
    )
    assert model.latent is not None
    return replace(
        model,
        attention_scale=model.attention_scale * (hidden / query_latent) ** 0.5,
        latent=replace(model.latent, factor=(hidden / model.latent.latent) ** 0.5),
    )


def _names_of(half: int) -> ModuleNames:
    return ModuleNames(
        attention_norm=f"input_layernorm.{half}",
        mlp_norm=f"post_attention_layernorm.{half}",
        o=f"self_attn.{half}.o_proj",
        gate_up=(f"mlps.{half}.gate_proj", f"mlps.{half}.up_proj"),
        down=f"mlps.{half}.down_proj",
        routers=("mlp.router.classifier",),
        corrections=("mlp.router.e_score_correction_bias",),
        are_of_halves=True,
    )


def _read_experts(config: PretrainedConfig) -> MoEConfig:
    """Read the experts, which stand beside the first half of each layer, and the choices that stand for none."""
    refuse(config, router_bias=False, norm_topk_prob=False)
    layers, names = (True, False) * config.num_layers, ("n_routed_experts", "moe_topk")
    none = count_of(config, "zero_expert_num")
    experts = read_experts(config, layers, "expert_ffn_hidden_size", False, None, *names, none)
    assert experts is not None
    routing = replace(experts.routing, scale=float(positive("routed_scaling_factor", config.routed_scaling_factor)))
    return replace(experts, routing=routing, corrected=True, float32_router=True, beside="halves")


def _spelling(experts: MoEConfig) -> Spelling:
    """Return the spelling of checkpoints of transformers, which have gates and ups of what is no expert, too."""
    none = "|".join(map(str, range(experts.count, experts.choices)))
    return Spelling(unread_part=re.compile(rf"\.experts\.({none})\.")) if none else AS_STORED
