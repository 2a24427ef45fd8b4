"""GLM-4.5 to 4.7 (Z.ai, 2025): the first layers are dense, and the others have experts, one of them for all tokens.

Solar Open has no dense layers. dots.llm1 has windows, and rotates whole heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanoinfer.models.description import Description
from nanoinfer.models.module_names import ModuleNames
from nanoinfer.models.reading.experts import read_corrected_experts, sparse_from
from nanoinfer.models.reading.rope import read_rope, read_rotary_dim
from nanoinfer.models.reading.settings import count_of
from nanoinfer.models.reading.shared import describe_common, predicting_layers, read_windows, refuse_windows

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAMES = ModuleNames(shared_experts=("mlp.shared_experts",))


def describe(config: PretrainedConfig) -> Description:
    """Describe a GLM-4.5 model: norms of each query and key head, if the config has them."""
    return _describe(
        config,
        sparse_from(config, "first_k_dense_replace"),
        qk_norm="head" if config.use_qk_norm else None,
        **predicting_layers(config, config.num_mtp_layers and count_of(config, "num_nextn_predict_layers")),
    )


def describe_glm4v_moe(config: PretrainedConfig) -> Description:
    """Describe the text part of GLM-4.5V and 4.6V: a GLM-4.5 without norms of queries and keys."""
    return _describe(config, sparse_from(config, "first_k_dense_replace"))


def describe_solar_open(config: PretrainedConfig) -> Description:
    """Describe a Solar Open model (Upstage, 2025): experts in all layers, and no norms of queries and keys."""
    return _describe(config, (True,) * config.num_hidden_layers)


def describe_dots1(config: PretrainedConfig) -> Description:
    """Describe a dots.llm1 model (rednote-hilab, 2025): the layers that layer_types names have a window."""
    return describe_common(
        config,
        names=NAMES,
        windows=read_windows(config, config.sliding_window),
        qk_norm="head",
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        experts=read_corrected_experts(config, sparse_from(config, "first_k_dense_replace")),
    )


def _describe(config: PretrainedConfig, sparse: tuple[bool, ...], **own: Any) -> Description:
    """Describe what all but dots.llm1 have: half a head is rotated; sparse: for each layer, whether it has experts."""
    refuse_windows(config)
    rope = read_rope(config, read_rotary_dim(config))
    return describe_common(
        config,
        names=NAMES,
        ropes=(rope,) * config.num_hidden_layers,
        qkv_bias=config.attention_bias,
        experts=read_corrected_experts(config, sparse),
        **own,
    )
