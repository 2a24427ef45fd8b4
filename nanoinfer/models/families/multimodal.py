"""The language models of multimodal checkpoints; nanoinfer reads nothing else from them."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from nanoinfer.models.description import Description
from nanoinfer.models.families import (
    apertus,
    exaone4,
    glm,
    granite,
    llama,
    mistral,
    muse_glimmer,
    qwen2,
    qwen3,
)
from nanoinfer.models.families.encoders import embedding_gemma2
from nanoinfer.models.families.gemma import gemma, gemma4
from nanoinfer.models.families.hybrids import lfm2, qwen3_5
from nanoinfer.models.families.latent import deepseek, mistral4
from nanoinfer.models.families.mixtures import glm4_moe
from nanoinfer.models.reading.rope import in_sections
from nanoinfer.models.reading.settings import refuse
from nanoinfer.models.reading.shared import refuse_windows
from nanoinfer.weights.formats.table import read_formats
from nanoinfer.weights.names import Spelling

if TYPE_CHECKING:
    from transformers import PretrainedConfig


OF_IDEFICS = Spelling(parts=(("text_model.", ""),))


def describe_apertus1p5(config: PretrainedConfig) -> Description:
    """Describe an Apertus 1.5, whose images and sounds are tokens: nanoinfer does not make these."""
    model = _describe_text(config, apertus.describe_1p5)
    if model.embedded_ids is not None:
        refuse(config, tie_word_embeddings=False)
    return model


def describe_embedding_gemma2(config: PretrainedConfig) -> Description:
    """Describe an EmbeddingGemma 2, whose images and sounds are not read."""
    return _describe_text(config, embedding_gemma2.describe)


def describe_exaone4_5(config: PretrainedConfig) -> Description:
    """Describe an EXAONE 4.5: a token has one position, and layers that guess further tokens are not read."""
    return replace(_describe_text(config, exaone4.describe), skipped=("mtp.",))


def describe_gemma3(config: PretrainedConfig) -> Description:
    """Describe a Gemma 3 model of 4B or more parameters: its logits have no cap, and images are seen as a whole."""
    model = _describe_text(config, gemma.describe_gemma3)
    return replace(model, logit_cap=None, whole_images=(True,) * model.num_layers)


def describe_gemma4(config: PretrainedConfig) -> Description:
    """Describe a Gemma 4 model, one whose images pass through the decoder's own layers ("unified") included."""
    model = _describe_text(config, gemma4.describe)
    if config.get_text_config().use_bidirectional_attention != "vision":
        return model
    return replace(model, whole_images=tuple(window is not None for window in model.windows))


def describe_glm4v(config: PretrainedConfig) -> Description:
    """Describe a GLM-4.1V or a GLM-4.6V-Flash: positions as in Qwen2-VL."""
    return _in_sections(config, _describe_text(config, glm.describe_glm4v), [8, 12, 12], interleaved=False)


def describe_glm4v_moe(config: PretrainedConfig) -> Description:
    """Describe a GLM-4.5V or 4.6V: positions as in Qwen2-VL."""
    return _in_sections(config, _describe_text(config, glm4_moe.describe_glm4v_moe), [8, 12, 12], interleaved=False)


def describe_granite_docling(config: PretrainedConfig) -> Description:
    """Describe a Granite Docling."""
    return replace(_describe_text(config, granite.describe_granite), spelling=OF_IDEFICS)


def describe_idefics3(config: PretrainedConfig) -> Description:
    """Describe an Idefics 3 or a SmolVLM."""
    return replace(_describe_text(config, _describe_any), spelling=OF_IDEFICS)


def describe_internvl(config: PretrainedConfig) -> Description:
    """Describe an InternVL whose files transformers reads ("-hf"), with the text part of any supported class."""
    return _describe_text(config, _describe_any)


def describe_kimi(config: PretrainedConfig) -> Description:
    """Describe a Kimi K2.5, whose images are not read; transformers saves its layers as the tower's are named."""
    return replace(_describe_text(config, deepseek.describe_v3), spelling=Spelling(parts=((".blocks.", ".layers."),)))


def describe_lfm2_vl(config: PretrainedConfig) -> Description:
    """Describe an LFM2-VL."""
    return _describe_text(config, lfm2.describe)


def describe_llava_onevision(config: PretrainedConfig) -> Description:
    """Describe a LLaVA-OneVision, with the text part of any supported class."""
    refuse(config, vision_feature_select_strategy="full")
    return _describe_text(config, _describe_any)


def describe_minicpmv(config: PretrainedConfig) -> Description:
    """Describe a MiniCPM-V 4.6, whose videos are not read: a token has one position, unlike in Qwen3.5."""
    return _describe_text(config, qwen3_5.describe)


def describe_mistral3(config: PretrainedConfig) -> Description:
    """Describe a Mistral Small 3.1 or 4, or a Ministral 3 model."""
    kinds = {"ministral3": mistral.describe_ministral3, "mistral4": mistral4.describe}
    return _describe_text(config, kinds.get(config.get_text_config().model_type, mistral.describe_mistral))


def describe_muse_glimmer(config: PretrainedConfig) -> Description:
    """Describe a Muse Glimmer."""
    return _describe_text(config, muse_glimmer.describe)


def describe_paddleocr_vl(config: PretrainedConfig) -> Description:
    """Describe a PaddleOCR-VL: positions as in Qwen2-VL."""
    return _in_sections(config, _describe_text(config, llama.describe_paddleocr), [16, 24, 24], interleaved=False)


def describe_qwen2_audio(config: PretrainedConfig) -> Description:
    """Describe a Qwen2-Audio."""
    return replace(_describe_text(config, _describe_any), hears=True)


def describe_qwen2_vl(config: PretrainedConfig) -> Description:
    """Describe a Qwen2-VL or 2.5-VL model: a token has three positions, which are equal for text."""
    return _in_sections(config, _describe_text(config, qwen2.describe), [16, 24, 24], interleaved=False)


def describe_qwen3_vl(config: PretrainedConfig) -> Description:
    """Describe a Qwen3-VL model: positions as in Qwen2-VL. The model has no windows; layer_types may name none."""
    refuse_windows(config.get_text_config())
    return _in_sections(config, _describe_text(config, qwen3.describe), [24, 20, 20])


def describe_qwen3_vl_moe(config: PretrainedConfig) -> Description:
    """Describe a Qwen3-VL model of experts: positions as in Qwen2-VL, no windows; a token's weights add up to 1."""
    refuse_windows(config.get_text_config())
    model = _describe_text(config, partial(qwen3.describe_moe, normalised=True))
    return _in_sections(config, model, [24, 20, 20])


def describe_qwen3_5(config: PretrainedConfig) -> Description:
    """Describe a dense Qwen3.5 model: positions as in Qwen2-VL."""
    return _in_sections(config, _describe_text(config, qwen3_5.describe), [11, 11, 10])


def describe_qwen3_5_moe(config: PretrainedConfig) -> Description:
    """Describe a Qwen3.5 model of experts: positions as in Qwen2-VL."""
    return _in_sections(config, _describe_text(config, qwen3_5.describe_moe), [11, 11, 10])


def _describe_any(text: PretrainedConfig) -> Description:
    """Describe a text part by its own class, or by the one that transformers has for its model_type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    from nanoinfer.models import describe  # which imports this file

    named = copy(text)
    named.architectures = text.architectures or [NAMES.get(text.model_type, text.model_type)]
    return describe(named)


def _in_sections(
    config: PretrainedConfig, model: Description, default: list[int], interleaved: bool = True
) -> Description:
    text = config.get_text_config()
    return replace(model, ropes=tuple(in_sections(text, rope, default, interleaved) for rope in model.ropes))


def _describe_text(config: PretrainedConfig, describe: Callable[[PretrainedConfig], Description]) -> Description:
    tied = bool(getattr(config, "tie_word_embeddings", False))  # the outer one decides, and a class may have none
    text = config.get_text_config()
    is_whole = getattr(config, "quantization_config", None) is not None  # else it may be in what is the text's
    formats = read_formats(config if is_whole else text).of_language_model()
    return replace(describe(text), tied=tied, is_multimodal=True, formats=formats)
