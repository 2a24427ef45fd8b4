"""StarCoder2 (Lozhkov et al., 2024): Llama's attention, with LayerNorms and an MLP without gates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoinfer.layers.norm import NormKind
from nanoinfer.models.description import Description
from nanoinfer.models.module_names import ModuleNames
from nanoinfer.models.reading.shared import describe_common, same_windows

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def describe(config: PretrainedConfig) -> Description:
    """Describe a StarCoder2: all layers have the window, if any, and all projections biases, or none."""
    return describe_common(
        config,
        eps_field="norm_epsilon",
        names=ModuleNames(gate_up=("mlp.c_fc",), down="mlp.c_proj"),
        norm=NormKind(centred=True, has_bias=True),
        windows=same_windows(config),
        qkv_bias=config.use_bias,
        o_bias=config.use_bias,
        mlp_bias=config.use_bias,
        is_gated=False,
    )
