"""DistilBERT (Sanh et al., 2019): BERT without token types, under names of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoinfer.layers.heads.text_head import TextHeadNames
from nanoinfer.layers.norm import NormKind
from nanoinfer.layers.positions import PositionTable
from nanoinfer.models.description import Description
from nanoinfer.models.families.encoders.bert import TOKENS, spelling
from nanoinfer.models.module_names import ModuleNames
from nanoinfer.models.reading.settings import size_of
from nanoinfer.models.reading.shared import describe_common, heads_of_their_own

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAMES = ModuleNames(
    attention_norm="sa_layer_norm",
    mlp_norm="output_layer_norm",
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    o="attention.out_lin",
    gate_up=("ffn.lin1",),
    down="ffn.lin2",
)


def describe(config: PretrainedConfig) -> Description:
    """Describe a DistilBERT."""
    rows = size_of(config, "max_position_embeddings")
    return describe_common(
        config,
        "activation",
        names=NAMES,
        spelling=spelling("distilbert", TOKENS, "transformer.layer."),
        skipped=("vocab_",),
        norm=NormKind(centred=True, has_bias=True),
        norm_eps=1e-12,
        is_encoder=True,
        post_norm=True,
        embedding_norm="model.embeddings.LayerNorm",
        positions=PositionTable("model.embeddings.position_embeddings", rows),
        max_position=rows,
        kv_heads=heads_of_their_own(config),
        ropes=(None,) * config.num_hidden_layers,
        intermediate_size=size_of(config, "hidden_dim"),
        is_gated=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        tied=False,
        text_head=TextHeadNames("pre_classifier", "classifier", "relu"),
    )
