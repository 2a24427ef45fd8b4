"""Persimmon (Adept, 2023): norms of queries and keys, a squared ReLU, and half of each head rotated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoinfer.layers.norm import NormKind
from nanoinfer.models.description import Description
from nanoinfer.models.families.classics.phi import HEAD_NORMS
from nanoinfer.models.module_names import ModuleNames
from nanoinfer.models.reading.rope import read_rope, read_rotary_dim
from nanoinfer.models.reading.shared import describe_common, heads_of_their_own

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAMES = ModuleNames(
    last_norm="model.final_layernorm",
    qkv=("self_attn.query_key_value",),
    o="self_attn.dense",
    gate_up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)


def describe(config: PretrainedConfig) -> Description:
    """Describe a Persimmon, whose heads have a query, a key and a value each, in one tensor."""
    return describe_common(
        config,
        eps_field="layer_norm_eps",
        kv_heads=heads_of_their_own(config),
        names=NAMES,
        norm=NormKind(centred=True, has_bias=True),
        head_norms=HEAD_NORMS if config.qk_layernorm else None,
        ropes=(read_rope(config, read_rotary_dim(config)),) * config.num_hidden_layers,
        qkv_layout="groups",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        is_gated=False,
    )
