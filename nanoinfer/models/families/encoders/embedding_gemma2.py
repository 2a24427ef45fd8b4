"""EmbeddingGemma 2 (Gemma Team, 2026): Gemma 4's layers, whose tokens see those behind them, too."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nanoinfer.layers.layer_inputs import LayerInputSizes
from nanoinfer.models.attention.heads import KVHeads
from nanoinfer.models.description import Description
from nanoinfer.models.families.gemma.gemma4 import NAMES
from nanoinfer.models.reading.rope import read_rope
from nanoinfer.models.reading.settings import head_dim_of, kv_count_of, of_layers, size_of
from nanoinfer.models.reading.shared import describe_common, read_windows

if TYPE_CHECKING:
    from transformers import PretrainedConfig

INPUTS = LayerInputSizes(
    size=0,
    embedding=None,
    projection="model.ple.per_layer_model_projection",
    norm="model.ple.per_layer_projection_norm",
    gate="ple_block.per_layer_input_gate",
    output="ple_block.per_layer_projection",
    post_norm="ple_block.post_per_layer_input_norm",
)
ROPES = ("default", "proportional")


def describe(config: PretrainedConfig) -> Description:
    """Describe the text part: inputs of layers are made of embeddings alone, and its result is projected."""
    kinds = of_layers(config, "layer_types")
    of_kind = {kind: config.per_layer_config[kind] for kind in kinds}
    ropes = {kind: read_rope(own, head_dim_of(own), kind, ROPES) for kind, own in of_kind.items()}
    heads = {kind: KVHeads(kv_count_of(own), head_dim_of(own)) for kind, own in of_kind.items()}
    return describe_common(
        of_kind[kinds[0]],
        "hidden_activation",
        names=NAMES,
        is_encoder=True,
        windows=read_windows(config, config.sliding_window + 1),
        ropes=tuple(ropes[kind] for kind in kinds),
        kv_heads=tuple(heads[kind] for kind in kinds),
        qk_norm="head",
        value_norm=True,
        attention_scale=1.0,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        embedding_scale=config.hidden_size**0.5,
        layer_inputs=replace(INPUTS, size=size_of(config, "hidden_size_per_layer_input")),
        result_projection="model.embedding_projection",
        result_size=size_of(config, "embedding_dim"),
    )
