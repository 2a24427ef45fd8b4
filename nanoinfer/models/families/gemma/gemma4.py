"""Gemma 4 (Gemma Team, 2026): larger heads in layers without a window, normalised values, a scale behind each layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nanoinfer.models.description import Description, KVHeads
from nanoinfer.models.families.gemma import gemma
from nanoinfer.models.reading import describe_common, read_windows
from nanoinfer.models.rope import read_rope
from nanoinfer.models.settings import head_dim_of, kv_count_of, of_layers, positive_or_none, refuse

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAMES = replace(gemma.NAMES, layer_scale="layer_scalar")
ROPES = ("default", "proportional")


def describe(config: PretrainedConfig) -> Description:
    """Describe a dense Gemma 4 model."""
    if config.use_bidirectional_attention != "vision":  # text does not notice it
        refuse(config, use_bidirectional_attention=None)
    refuse(config, hidden_size_per_layer_input=0, enable_moe_block=False, num_kv_shared_layers=0)
    windows = read_windows(config, config.sliding_window)
    kinds = of_layers(config, "layer_types")
    of_kind = {kind: config.per_layer_config[kind] for kind in kinds}
    ropes = {kind: read_rope(own, head_dim_of(own), kind, ROPES) for kind, own in of_kind.items()}
    heads = {kind: _read_heads(own, kind) for kind, own in of_kind.items()}
    return describe_common(
        of_kind[kinds[0]],
        "hidden_activation",
        names=NAMES,
        windows=windows,
        ropes=tuple(ropes[kind] for kind in kinds),
        kv_heads=tuple(heads[kind] for kind in kinds),
        qk_norm="head",
        value_norm=True,
        attention_scale=1.0,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        embedding_scale=config.hidden_size**0.5,
        logit_cap=positive_or_none("final_logit_softcapping", config.final_logit_softcapping),
    )


def _read_heads(config: PretrainedConfig, kind: str) -> KVHeads:
    """Read the heads of the layers of one kind; config: as it holds for these."""
    return KVHeads(kv_count_of(config), head_dim_of(config), config.attention_k_eq_v and kind == "full_attention")
