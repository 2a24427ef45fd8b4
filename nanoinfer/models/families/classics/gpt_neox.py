"""GPT-NeoX (Black et al., 2022) and Pythia (Biderman et al., 2023): branches side by side, each with its own norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoinfer.layers.norm import NormKind
from nanoinfer.models.description import Description
from nanoinfer.models.families.classics.spelling import spelling
from nanoinfer.models.module_names import ModuleNames
from nanoinfer.models.reading.rope import read_rope, read_rotary_dim
from nanoinfer.models.reading.shared import describe_common, heads_of_their_own

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAMES = ModuleNames(
    last_norm="model.final_layer_norm",
    qkv=("attention.query_key_value",),
    o="attention.dense",
    gate_up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)


def describe(config: PretrainedConfig) -> Description:
    """Describe a GPT-NeoX: a share of each head is rotated."""
    return describe_common(
        config,
        eps_field="layer_norm_eps",
        kv_heads=heads_of_their_own(config),
        names=NAMES,
        spelling=spelling(("gpt_neox",), "embed_in", "layers", head="embed_out"),
        norm=NormKind(centred=True, has_bias=True),
        is_parallel=config.use_parallel_residual,
        ropes=(read_rope(config, read_rotary_dim(config)),) * config.num_hidden_layers,
        qkv_layout="groups",
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        mlp_bias=True,
        is_gated=False,
    )
