"""GLM-4.7-Flash (Z.ai, 2026): DeepSeek-V3's attention and experts, in the layers that mlp_layer_types names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoinfer.models.description import Description
from nanoinfer.models.experts import listed_layers, read_corrected_experts
from nanoinfer.models.families.latent.deepseek import NAMES
from nanoinfer.models.latent import describe_latent
from nanoinfer.models.reading import guessing_layers
from nanoinfer.models.settings import count_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def describe(config: PretrainedConfig) -> Description:
    """Describe a GLM-4.7-Flash."""
    has_further = getattr(config, "num_nextn_predict_layers", None)
    return describe_latent(
        config,
        bool(config.rope_interleave),
        names=NAMES,
        o_bias=config.attention_bias,
        experts=read_corrected_experts(config, listed_layers(config)),
        skipped=guessing_layers(config, has_further and count_of(config, "num_nextn_predict_layers")),
    )
