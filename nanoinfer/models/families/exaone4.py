"""EXAONE 4 (LG AI Research, 2025): norms on branches' results, a q/k norm by head, layers without rotation.

K-EXAONE has norms on branches' inputs, and experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanoinfer.models.description import Description, ModuleNames
from nanoinfer.models.experts import listed_layers, read_corrected_experts
from nanoinfer.models.reading import describe_common, read_windows
from nanoinfer.models.rope import read_rope
from nanoinfer.models.settings import head_dim_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAMES = ModuleNames(
    attention_norm=None,
    attention_post_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_post_norm="post_feedforward_layernorm",
)


MOE_NAMES = ModuleNames(
    corrections=("mlp.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
    shared_experts=("mlp.shared_experts",),
)


def describe(config: PretrainedConfig) -> Description:
    """Describe an EXAONE 4 model."""
    return _describe(config, names=NAMES)


def describe_moe(config: PretrainedConfig) -> Description:
    """Describe a K-EXAONE model (LG AI Research, 2026): the first layers are dense."""
    experts = read_corrected_experts(config, listed_layers(config), "num_experts", "num_shared_experts")
    return _describe(config, names=MOE_NAMES, experts=experts)


def _describe(config: PretrainedConfig, **own: Any) -> Description:
    """With a sliding_window, the layers that see all tokens do not rotate."""
    windows = read_windows(config, config.sliding_window)
    rope = read_rope(config, head_dim_of(config))
    rotates = [window is not None or config.sliding_window is None for window in windows]
    return describe_common(
        config,
        windows=windows,
        ropes=tuple(rope if is_rotated else None for is_rotated in rotates),
        qk_norm="head",
        **own,
    )
