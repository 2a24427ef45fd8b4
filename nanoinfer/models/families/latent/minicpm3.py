"""MiniCPM3 (OpenBMB, 2024): dense layers, and factors of the embeddings, of the branches' results and of the logits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from nanoinfer.models.description import Description
from nanoinfer.models.reading.latent import describe_latent
from nanoinfer.models.reading.rope import ANY_LENGTH
from nanoinfer.models.reading.settings import positive

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def describe(config: PretrainedConfig) -> Description:
    """Describe a MiniCPM3; angles may turn otherwise in long sequences (LongRoPE)."""
    return describe_latent(
        config,
        False,
        (*ANY_LENGTH, "longrope"),
        o_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        embedding_scale=float(positive("scale_emb", config.scale_emb)),
        residual_scale=positive("scale_depth", config.scale_depth) / math.sqrt(config.num_hidden_layers),
        logit_scale=positive("dim_model_base", config.dim_model_base) / config.hidden_size,
    )
