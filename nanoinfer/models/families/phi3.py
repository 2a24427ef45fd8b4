"""Phi-3 and Phi-4 (Abdin et al., 2024): fused tensors, a share of each head rotated, LongRoPE."""

from __future__ import annotations

from transformers import PretrainedConfig

from nanoinfer.models.description import Description, Names
from nanoinfer.models.reading import describe_common, head_dim_of, same_window
from nanoinfer.models.rope import read_rope, read_rotated


def describe(config: PretrainedConfig) -> Description:
    """One window for all layers, if any."""
    rotated = read_rotated(config, head_dim_of(config))
    return describe_common(
        config,
        names=Names(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
        windows=same_window(config),
        ropes=(read_rope(config, rotated, types=("default", "longrope")),) * config.num_hidden_layers,
    )
