"""BLOOM (BigScience, 2022): ALiBi in place of positions, and a norm behind the embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoinfer.layers.norm import NormKind
from nanoinfer.models.attention.alibi import alibi_slopes
from nanoinfer.models.description import Description
from nanoinfer.models.families.classics.spelling import spelling
from nanoinfer.models.module_names import ModuleNames
from nanoinfer.models.reading.settings import refuse
from nanoinfer.models.reading.shared import describe_common, heads_of_their_own

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAMES = ModuleNames(
    last_norm="model.ln_f",
    qkv=("self_attention.query_key_value",),
    o="self_attention.dense",
    gate_up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)
OTHERS = "word_embeddings_layernorm", "ln_f"
TRAINED_LENGTH = 2048  # of published models, whose configs name none


def describe(config: PretrainedConfig) -> Description:
    """Describe a BLOOM, whose tensor of heads has each head's query, key and value together."""
    refuse(config, apply_residual_connection_post_layernorm=False)
    return describe_common(
        config,
        None,
        "layer_norm_epsilon",
        names=NAMES,
        spelling=spelling(("transformer",), "word_embeddings", "h", OTHERS),
        norm=NormKind(centred=True, has_bias=True),
        embedding_norm="model.word_embeddings_layernorm",
        alibi=alibi_slopes(config.num_attention_heads),
        max_position=getattr(config, "seq_length", None) or TRAINED_LENGTH,
        kv_heads=heads_of_their_own(config),
        ropes=(None,) * config.num_hidden_layers,
        qkv_layout="groups",
        qkv_bias=True,
        o_bias=True,
        intermediate_size=4 * config.hidden_size,
        activation="gelu_tanh",
        is_gated=False,
        mlp_bias=True,
    )
