"""OPT (Zhang et al., 2022): vectors for positions, and a ReLU; one size has its norms behind the sums."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nanoinfer.layers.heads.head_transform import HeadTransform
from nanoinfer.layers.norm import NormKind
from nanoinfer.layers.positions import PositionTable
from nanoinfer.models.description import Description
from nanoinfer.models.families.classics.spelling import spelling
from nanoinfer.models.module_names import ModuleNames
from nanoinfer.models.reading.settings import size_of
from nanoinfer.models.reading.shared import describe_common, heads_of_their_own

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAMES = ModuleNames(
    attention_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    last_norm="model.final_layer_norm",
    o="self_attn.out_proj",
    gate_up=("fc1",),
    down="fc2",
)
FIRST = 2  # the row of position 0


def describe(config: PretrainedConfig) -> Description:
    """Describe an OPT."""
    rows, is_learned = size_of(config, "max_position_embeddings"), bool(config.layer_norm_elementwise_affine)
    biases = bool(config.enable_bias)
    return describe_common(
        config,
        "activation_function",
        kv_heads=heads_of_their_own(config),
        names=replace(NAMES, last_norm=None) if config._remove_final_layer_norm else NAMES,
        spelling=spelling(("model.decoder", "decoder"), "embed_tokens", "layers"),
        norm=NormKind(centred=True, has_weight=is_learned, has_bias=is_learned),
        norm_eps=1e-5,
        post_norm=not config.do_layer_norm_before,
        positions=PositionTable("model.embed_positions", rows + FIRST, FIRST),
        max_position=rows,
        ropes=(None,) * config.num_hidden_layers,
        intermediate_size=size_of(config, "ffn_dim"),
        is_gated=False,
        qkv_bias=biases,
        o_bias=biases,
        mlp_bias=biases,
        **_read_projections(config),
    )


def _read_projections(config: PretrainedConfig) -> dict[str, Any]:
    """Read what stands behind the embeddings and before the head, which is tied to them, where their size differs."""
    size = size_of(config, "word_embed_proj_dim")
    if size == config.hidden_size:
        return {}
    transform = HeadTransform("model.project_out", size)
    return {"embedding_size": size, "embedding_projection": "model.project_in", "head_transform": transform}
