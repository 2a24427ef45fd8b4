"""Phi-1 to Phi-2 (Gunasekar et al., 2023): branches side by side, behind one norm; a share of each head is rotated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoinfer.layers.head_norm import HeadNorms
from nanoinfer.layers.norm import NormKind
from nanoinfer.models.description import Description
from nanoinfer.models.module_names import ModuleNames
from nanoinfer.models.reading.rope import read_rope, read_rotary_dim
from nanoinfer.models.reading.shared import describe_common

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAMES = ModuleNames(
    mlp_norm=None,
    last_norm="model.final_layernorm",
    o="self_attn.dense",
    gate_up=("mlp.fc1",),
    down="mlp.fc2",
)
HEAD_NORMS = HeadNorms("self_attn.q_layernorm", "self_attn.k_layernorm", "one", has_bias=True)


def describe(config: PretrainedConfig) -> Description:
    """Describe a Phi, which has all biases."""
    return describe_common(
        config,
        eps_field="layer_norm_eps",
        names=NAMES,
        norm=NormKind(centred=True, has_bias=True),
        is_parallel=True,
        head_norms=HEAD_NORMS if config.qk_layernorm else None,
        ropes=(read_rope(config, read_rotary_dim(config)),) * config.num_hidden_layers,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        is_gated=False,
        head_bias=True,
    )
