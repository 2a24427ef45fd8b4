"""Falcon (Almazrouei et al., 2023): branches side by side or not, with rotations or ALiBi, in three architectures."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from nanoinfer.layers.norm import NormKind
from nanoinfer.models.attention.alibi import alibi_slopes
from nanoinfer.models.attention.heads import KVHeads
from nanoinfer.models.description import Description
from nanoinfer.models.families.classics.bloom import NAMES
from nanoinfer.models.families.classics.spelling import spelling
from nanoinfer.models.module_names import ModuleNames
from nanoinfer.models.reading.rope import read_rope
from nanoinfer.models.reading.settings import size_of
from nanoinfer.models.reading.shared import describe_common

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def describe(config: PretrainedConfig) -> Description:
    """Describe a Falcon: the newer architecture always has its branches side by side."""
    layers, head_dim = config.num_hidden_layers, config.hidden_size // config.num_attention_heads
    is_new, is_parallel = config.new_decoder_architecture, config.new_decoder_architecture or config.parallel_attn
    count = size_of(config, "num_kv_heads") if is_new else 1 if config.multi_query else config.num_attention_heads
    return describe_common(
        config,
        "activation",
        "layer_norm_epsilon",
        names=_names(config) if is_parallel else NAMES,
        spelling=spelling(("transformer",), "word_embeddings", "h", ("ln_f",)),
        norm=NormKind(centred=True, has_bias=True),
        is_parallel=is_parallel,
        max_position=size_of(config, "max_position_embeddings"),
        kv_heads=(KVHeads(count, head_dim),) * layers,
        qkv_layout="groups" if is_new or not config.multi_query else "stacked",
        qkv_bias=config.bias,
        o_bias=config.bias,
        mlp_bias=config.bias,
        intermediate_size=size_of(config, "ffn_hidden_size"),
        is_gated=False,
        **_positions(config, head_dim),
    )


def _names(config: PretrainedConfig) -> ModuleNames:
    """Return the names where branches stand side by side: behind two norms, or one."""
    count = config.num_ln_in_parallel_attn
    if count not in (None, 1, 2):
        raise ValueError(f"model: num_ln_in_parallel_attn={count!r} in its config: must be 1 or 2")
    if config.new_decoder_architecture and count in (None, 2):
        return replace(NAMES, attention_norm="ln_attn", mlp_norm="ln_mlp")
    return replace(NAMES, mlp_norm=None)


def _positions(config: PretrainedConfig, head_dim: int) -> dict[str, Any]:
    """Return the rotation, or the slopes of ALiBi, which are rounded, and divided as scores are."""
    layers = config.num_hidden_layers
    if not config.alibi:
        return {"ropes": (read_rope(config, head_dim),) * layers}
    slopes = torch.tensor(alibi_slopes(config.num_attention_heads)).bfloat16().float() * head_dim**-0.5
    return {"ropes": (None,) * layers, "alibi": tuple(slopes.tolist())}
