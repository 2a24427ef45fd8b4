"""GLM-4.7-Flash (Z.ai, 2026): DeepSeek-V3's attention and experts, in the layers that mlp_layer_types names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoinfer.models.description import Description
from nanoinfer.models.families.latent.deepseek import describe_corrected
from nanoinfer.models.reading.experts import listed_layers

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def describe(config: PretrainedConfig) -> Description:
    """Describe a GLM-4.7-Flash."""
    return describe_corrected(config, listed_layers(config))
