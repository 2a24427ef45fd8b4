"""ModernBERT's decoder (Weller et al., 2025): a norm behind the embeddings; layers before the output projection."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nanoinfer.layers.heads.head_transform import HeadTransform
from nanoinfer.layers.norm import NormKind
from nanoinfer.models.description import EMBEDDING, HEAD, Description
from nanoinfer.models.module_names import ModuleNames
from nanoinfer.models.reading.rope import read_rope
from nanoinfer.models.reading.settings import head_dim_of
from nanoinfer.models.reading.shared import describe_common, heads_of_their_own, read_activation, read_windows
from nanoinfer.weights.names import Spelling

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAMES = ModuleNames(
    attention_norm="attn_norm",
    mlp_norm="mlp_norm",
    last_norm="model.final_norm",
    qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    o="attn.Wo",
    gate_up=("mlp.Wi",),
    down="mlp.Wo",
)
SPELLING = Spelling(
    (
        ("model.embeddings.tok_embeddings.", f"{EMBEDDING}."),
        ("decoder.", f"{HEAD}."),
        ("lm_head.", "model.head."),  # what other models call so projects to the vocabulary
    )
)


def describe(config: PretrainedConfig) -> Description:
    """Describe a ModernBERT's decoder: the embeddings' norm is also that of the first layer's attention."""
    first = replace(NAMES, attention_norm=None)
    ropes = {kind: read_rope(config, head_dim_of(config), kind) for kind in set(config.layer_types)}
    return describe_common(
        config,
        "hidden_activation",
        "norm_eps",
        kv_heads=heads_of_their_own(config),
        names=NAMES,
        layer_names=(first, *(NAMES,) * (config.num_hidden_layers - 1)),
        spelling=SPELLING,
        norm=NormKind(centred=True, has_bias=config.norm_bias),
        embedding_norm="model.embeddings.norm",
        windows=read_windows(config, config.sliding_window),
        ropes=tuple(ropes[kind] for kind in config.layer_types),
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        head_bias=config.decoder_bias,
        head_transform=HeadTransform(
            "model.head.dense",
            config.hidden_size,
            config.classifier_bias,
            read_activation(config, "classifier_activation"),
            "model.head.norm",
        ),
    )
