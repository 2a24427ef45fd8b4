"""Command R (Cohere, 2024) and Command R7B (2024): branches side by side, behind one LayerNorm; heads turn in pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanoinfer.layers.head_norm import HeadNorms
from nanoinfer.layers.norm import NormKind
from nanoinfer.models.description import Description
from nanoinfer.models.module_names import ModuleNames
from nanoinfer.models.reading.rope import read_rope
from nanoinfer.models.reading.settings import head_dim_of, positive
from nanoinfer.models.reading.shared import describe_common, read_windows, refuse_windows

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def describe_cohere(config: PretrainedConfig) -> Description:
    """Describe a Command R; the larger one has norms of queries and keys, with weights for each head."""
    refuse_windows(config)
    norms = HeadNorms("self_attn.q_norm", "self_attn.k_norm", "rows") if config.use_qk_norm else None
    rope = read_rope(config, head_dim_of(config), interleaved=True)
    return _describe(config, head_norms=norms, ropes=(rope,) * config.num_hidden_layers)


def describe_cohere2(config: PretrainedConfig) -> Description:
    """Describe a Command R7B: layers without a window do not rotate."""
    windows = read_windows(config, config.sliding_window)
    rope = read_rope(config, head_dim_of(config), interleaved=True)
    return _describe(config, windows=windows, ropes=tuple(rope if window else None for window in windows))


def _describe(config: PretrainedConfig, **own: Any) -> Description:
    return describe_common(
        config,
        eps_field="layer_norm_eps",
        names=ModuleNames(mlp_norm=None),
        norm=NormKind(centred=True),
        is_parallel=True,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        logit_scale=positive("logit_scale", config.logit_scale),
        **own,
    )
