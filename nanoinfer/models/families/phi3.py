"""Phi-3 and Phi-4 (Abdin et al., 2024): fused tensors, LongRoPE; a share of each head is rotated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoinfer.models.description import Description
from nanoinfer.models.module_names import ModuleNames
from nanoinfer.models.reading.rope import read_rope, read_rotary_dim
from nanoinfer.models.reading.shared import describe_common, same_windows

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def describe(config: PretrainedConfig) -> Description:
    """Describe a Phi-3 or Phi-4 model: all layers have the window, if any."""
    rope = read_rope(config, read_rotary_dim(config), types=("default", "longrope"))
    return describe_common(
        config,
        names=ModuleNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
        windows=same_windows(config),
        ropes=(rope,) * config.num_hidden_layers,
    )
