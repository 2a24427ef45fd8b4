"""The language models of multimodal checkpoints: what else is in them is not read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from transformers import PretrainedConfig

from nanoinfer.models.description import Description
from nanoinfer.models.families import gemma, mistral, qwen2, qwen3
from nanoinfer.models.reading import refuse_windows
from nanoinfer.models.settings import refuse


def describe_gemma3(config: PretrainedConfig) -> Description:
    """Gemma 3 from 4b on; its logits have no cap."""
    return replace(_describe_text(config, gemma.describe_gemma3), logit_cap=None)


def describe_mistral3(config: PretrainedConfig) -> Description:
    """Mistral Small 3.1 and Ministral 3."""
    is_ministral = config.get_text_config().model_type == "ministral3"
    return _describe_text(config, mistral.describe_ministral3 if is_ministral else mistral.describe_mistral)


def describe_qwen2_5_vl(config: PretrainedConfig) -> Description:
    """Positions in three dimensions, which are equal for text: the ordinary ones."""
    return _describe_text(config, qwen2.describe)


def describe_qwen3_vl(config: PretrainedConfig) -> Description:
    """Likewise, and no windows, whatever layer_types says."""
    refuse_windows(config.get_text_config())
    return _describe_text(config, qwen3.describe)


def _describe_text(config: PretrainedConfig, describe: Callable[[PretrainedConfig], Description]) -> Description:
    refuse(config, quantization_config=None)
    tied = bool(config.tie_word_embeddings)  # the outer one decides
    return replace(describe(config.get_text_config()), tied=tied, is_multimodal=True)
