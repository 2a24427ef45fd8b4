"""ModernBERT (Warner et al., 2024): norms before the branches, rotations, and windows in two of three layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nanoinfer.layers.heads.text_head import TextHeadNames
from nanoinfer.layers.norm import NormKind
from nanoinfer.models.description import Description
from nanoinfer.models.families.classics.modernbert import NAMES as DECODER_NAMES
from nanoinfer.models.families.encoders.bert import spelling
from nanoinfer.models.reading.rope import read_rope
from nanoinfer.models.reading.settings import head_dim_of, refuse
from nanoinfer.models.reading.shared import describe_common, heads_of_their_own, read_activation, read_windows
from nanoinfer.pooling.read import LabelsOf

if TYPE_CHECKING:
    from transformers import PretrainedConfig

READS: dict[str, LabelsOf] = {"cls": "first", "mean": "mean"}
NAMES = replace(DECODER_NAMES, qkv=("attn.Wqkv",))


def describe(config: PretrainedConfig) -> Description:
    """Describe a ModernBERT: the embeddings' norm is also that of the first layer's attention."""
    refuse(config, norm_bias=False)
    first = replace(NAMES, attention_norm=None)
    ropes = {kind: read_rope(config, head_dim_of(config), kind) for kind in set(config.layer_types)}
    return describe_common(
        config,
        "hidden_activation",
        "norm_eps",
        kv_heads=heads_of_their_own(config),
        names=NAMES,
        layer_names=(first, *(NAMES,) * (config.num_hidden_layers - 1)),
        spelling=spelling("model", "embeddings.tok_embeddings.", "layers."),
        skipped=("decoder.",),
        norm=NormKind(centred=True),
        is_encoder=True,
        embedding_norm="model.embeddings.norm",
        windows=read_windows(config, config.sliding_window + 1),
        ropes=tuple(ropes[kind] for kind in config.layer_types),
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        tied=False,
        text_head=TextHeadNames(
            "head.dense",
            "classifier",
            read_activation(config, "classifier_activation"),
            READS[config.classifier_pooling],
            "head.norm",
            bool(config.classifier_bias),
        ),
    )
