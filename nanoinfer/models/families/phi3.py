"""Phi-3 and Phi-4 (Abdin et al., 2024): fused tensors, a share of each head rotated, LongRoPE."""

from __future__ import annotations

from transformers import PretrainedConfig

from nanoinfer.models.description import Description, Names
from nanoinfer.models.reading import describe_common, head_dim_of
from nanoinfer.models.rope import read_rope


def describe(config: PretrainedConfig) -> Description:
    """One window for all layers, if any."""
    rotated = int(head_dim_of(config) * config.rope_parameters.get("partial_rotary_factor", 1.0))
    return describe_common(
        config,
        names=Names(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
        windows=(config.sliding_window,) * config.num_hidden_layers,
        ropes=(read_rope(config, rotated, types=("default", "longrope")),) * config.num_hidden_layers,
    )
