"""The supported models, by the class that a config.json names. docs/add-a-model.md says how to add one."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import torch

from nanoinfer.attention import AttentionBackend
from nanoinfer.models.causal_lm import CausalLM, Place, anywhere
from nanoinfer.models.description import Description
from nanoinfer.models.reading.classes import LACKING, READERS, described_as
from nanoinfer.models.reading.settings import check_sizes
from nanoinfer.parallel.tensor_parallel import TensorParallel

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FAMILIES = {
    "AfmoeForCausalLM": "mixtures.afmoe.describe",
    "Apertus1p5ForConditionalGeneration": "multimodal.describe_apertus1p5",
    "Apertus1p5TextForCausalLM": "apertus.describe_1p5",
    "ApertusForCausalLM": "apertus.describe",
    "ArceeForCausalLM": "llama.describe_arcee",
    "BambaForCausalLM": "hybrids.bamba.describe",
    "BloomForCausalLM": "classics.bloom.describe",
    "CodeGenForCausalLM": "classics.gptj.describe_codegen",
    "Cohere2ForCausalLM": "classics.cohere.describe_cohere2",
    "CohereForCausalLM": "classics.cohere.describe_cohere",
    "CwmForCausalLM": "llama.describe_cwm",
    "DbrxForCausalLM": "mixtures.dbrx.describe",
    "DeepseekV2ForCausalLM": "latent.deepseek.describe_v2",
    "DeepseekV3ForCausalLM": "latent.deepseek.describe_v3",
    "Dots1ForCausalLM": "mixtures.glm4_moe.describe_dots1",
    "Ernie4_5_MoeForCausalLM": "mixtures.ernie4_5_moe.describe",
    "Ernie4_5ForCausalLM": "llama.describe_ernie4_5",
    "Exaone4_5_ForConditionalGeneration": "multimodal.describe_exaone4_5",
    "Exaone4ForCausalLM": "exaone4.describe",
    "ExaoneMoeForCausalLM": "exaone4.describe_moe",
    "FalconForCausalLM": "classics.falcon.describe",
    "FalconH1ForCausalLM": "hybrids.falcon_h1.describe",
    "FlexOlmoForCausalLM": "olmo.describe_flex_olmo",
    "FlintForCausalLM": "mixtures.flint.describe",
    "Gemma2ForCausalLM": "gemma.gemma.describe_gemma2",
    "Gemma3ForCausalLM": "gemma.gemma.describe_gemma3",
    "Gemma3ForConditionalGeneration": "multimodal.describe_gemma3",
    "Gemma4ForCausalLM": "gemma.gemma4.describe",
    "Gemma4ForConditionalGeneration": "multimodal.describe_gemma4",
    "Gemma4UnifiedForCausalLM": "gemma.gemma4.describe",
    "Gemma4UnifiedForConditionalGeneration": "multimodal.describe_gemma4",
    "GemmaForCausalLM": "gemma.gemma.describe_gemma",
    "Glm46VForConditionalGeneration": "multimodal.describe_glm4v",
    "Glm4ForCausalLM": "glm.describe_glm4",
    "Glm4MoeForCausalLM": "mixtures.glm4_moe.describe",
    "Glm4MoeLiteForCausalLM": "latent.glm4_moe_lite.describe",
    "Glm4vForConditionalGeneration": "multimodal.describe_glm4v",
    "Glm4vMoeForConditionalGeneration": "multimodal.describe_glm4v_moe",
    "GlmForCausalLM": "glm.describe_glm",
    "GPT2LMHeadModel": "classics.gpt2.describe_gpt2",
    "GPTBigCodeForCausalLM": "classics.gpt2.describe_gpt_bigcode",
    "GPTJForCausalLM": "classics.gptj.describe_gptj",
    "GPTNeoXForCausalLM": "classics.gpt_neox.describe",
    "GptOssForCausalLM": "gpt_oss.describe",
    "GraniteDoclingForConditionalGeneration": "multimodal.describe_granite_docling",
    "GraniteForCausalLM": "granite.describe_granite",
    "GraniteMoeForCausalLM": "granite.describe_moe",
    "GraniteMoeSharedForCausalLM": "granite.describe_moe_shared",
    "GraniteMoeHybridForCausalLM": "hybrids.granite_hybrid.describe",
    "GraniteMoeSWAForCausalLM": "granite.describe_moe_swa",
    "GraniteSWAForCausalLM": "granite.describe_swa",
    "HeliumForCausalLM": "llama.describe_helium",
    "HunYuanDenseV1ForCausalLM": "llama.describe_hunyuan",
    "HunYuanMoEV1ForCausalLM": "mixtures.hunyuan_moe.describe",
    "HyperCLOVAXForCausalLM": "granite.describe_hyperclovax",
    "HYV3ForCausalLM": "mixtures.hy_v3.describe",
    "Idefics3ForConditionalGeneration": "multimodal.describe_idefics3",
    "InternVLForConditionalGeneration": "multimodal.describe_internvl",
    "Jais2ForCausalLM": "classics.nemotron.describe_jais2",
    "Kimi_K25ForConditionalGeneration": "multimodal.describe_kimi",
    "Kolibri1ForCausalLM": "exaone4.describe_kolibri",
    "Lfm2ForCausalLM": "hybrids.lfm2.describe",
    "Lfm2MoeForCausalLM": "hybrids.lfm2.describe_moe",
    "Lfm2VlForConditionalGeneration": "multimodal.describe_lfm2_vl",
    "LlamaForCausalLM": "llama.describe_llama",
    "LlavaOnevisionForConditionalGeneration": "multimodal.describe_llava_onevision",
    "LongcatFlashForCausalLM": "latent.longcat_flash.describe",
    "MellumForCausalLM": "qwen3.describe_mellum",
    "MiMoV2FlashForCausalLM": "mixtures.mimo_v2.describe",
    "MiniCPM3ForCausalLM": "latent.minicpm3.describe",
    "MiniCPMV4_6ForConditionalGeneration": "multimodal.describe_minicpmv",
    "MiniMaxM2ForCausalLM": "mixtures.minimax_m2.describe",
    "Ministral3ForCausalLM": "mistral.describe_ministral3",
    "MinistralForCausalLM": "mistral.describe_mistral",
    "Mistral3ForConditionalGeneration": "multimodal.describe_mistral3",
    "Mistral4ForCausalLM": "latent.mistral4.describe",
    "MistralForCausalLM": "mistral.describe_mistral",
    "MixtralForCausalLM": "mistral.describe_mixtral",
    "ModernBertDecoderForCausalLM": "classics.modernbert.describe",
    "MptForCausalLM": "classics.mpt.describe",
    "MuseGlimmerForConditionalGeneration": "multimodal.describe_muse_glimmer",
    "NanoChatForCausalLM": "llama.describe_nanochat",
    "NemotronHForCausalLM": "hybrids.nemotron_h.describe",
    "NemotronForCausalLM": "classics.nemotron.describe_nemotron",
    "Olmo2ForCausalLM": "olmo.describe_olmo2",
    "Olmo3ForCausalLM": "olmo.describe_olmo3",
    "OlmoeForCausalLM": "olmo.describe_olmoe",
    "OlmoForCausalLM": "olmo.describe_olmo",
    "OlmoHybridForCausalLM": "olmo.describe_hybrid",
    "OPTForCausalLM": "classics.opt.describe",
    "PaddleOCRVLForConditionalGeneration": "multimodal.describe_paddleocr_vl",
    "PersimmonForCausalLM": "classics.persimmon.describe",
    "Phi3ForCausalLM": "phi3.describe",
    "PhiForCausalLM": "classics.phi.describe",
    "PhimoeForCausalLM": "mixtures.phimoe.describe",
    "Qwen2_5_VLForConditionalGeneration": "multimodal.describe_qwen2_vl",
    "Qwen2AudioForConditionalGeneration": "multimodal.describe_qwen2_audio",
    "Qwen2ForCausalLM": "qwen2.describe",
    "Qwen2MoeForCausalLM": "qwen2.describe_moe",
    "Qwen2VLForConditionalGeneration": "multimodal.describe_qwen2_vl",
    "Qwen3_5ForCausalLM": "hybrids.qwen3_5.describe",
    "Qwen3_5ForConditionalGeneration": "multimodal.describe_qwen3_5",
    "Qwen3_5MoeForCausalLM": "hybrids.qwen3_5.describe_moe",
    "Qwen3_5MoeForConditionalGeneration": "multimodal.describe_qwen3_5_moe",
    "Qwen3ForCausalLM": "qwen3.describe",
    "Qwen3MoeForCausalLM": "qwen3.describe_moe",
    "Qwen3NextForCausalLM": "hybrids.qwen3_5.describe_next",
    "Qwen3VLForConditionalGeneration": "multimodal.describe_qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "multimodal.describe_qwen3_vl_moe",
    "SeedOssForCausalLM": "llama.describe_seed_oss",
    "SmolLM3ForCausalLM": "llama.describe_smollm3",
    "SmolVLMForConditionalGeneration": "multimodal.describe_idefics3",
    "SolarOpenForCausalLM": "mixtures.glm4_moe.describe_solar_open",
    "StableLmForCausalLM": "classics.stablelm.describe",
    "Starcoder2ForCausalLM": "classics.starcoder2.describe",
    "VaultGemmaForCausalLM": "gemma.gemma.describe_vaultgemma",
    "YoutuForCausalLM": "latent.deepseek.describe_youtu",
}  # each class with the file in families/ and the function in it that reads the config
ENCODERS = {
    "BertModel": "encoders.bert.describe_bert",
    "DistilBertModel": "encoders.distilbert.describe",
    "ElectraModel": "encoders.bert.describe_electra",
    "EmbeddingGemma2Model": "multimodal.describe_embedding_gemma2",
    "EmbeddingGemma2TextModel": "encoders.embedding_gemma2.describe",
    "ModernBertModel": "encoders.modernbert.describe",
    "MPNetModel": "encoders.mpnet.describe",
    "RobertaModel": "encoders.bert.describe_roberta",
    "XLMRobertaModel": "encoders.bert.describe_roberta",
}  # the same for encoders


def check_architectures(names: list[str]) -> None:
    """Raise ValueError unless `names`, a config.json's architectures, is a list that begins with a supported class."""
    if not isinstance(names, list):
        raise ValueError(f"model: architectures={names!r} in its config.json: must be a list of names")
    if not names or described_as(names[0]) not in FAMILIES | ENCODERS:
        lacking = LACKING.get(names[0]) if names else None
        if lacking is not None:
            raise ValueError(f"model: architecture {names[0]!r} is not supported: nanoinfer has no {lacking}")
        named = f"architecture {names[0]!r}" if names else "a config.json without 'architectures'"
        known = ", ".join((*FAMILIES, *READERS))
        raise ValueError(f"model: {named} is not supported; supported: {known}; no remote code runs here")


def describe(config: PretrainedConfig) -> Description:
    """Describe a config's model. Raises ValueError, naming the setting, if nanoinfer does not support one."""
    names = config.architectures or []
    check_architectures(names)
    check_sizes(config.get_text_config())
    file, function = (FAMILIES | ENCODERS)[described_as(names[0])].rsplit(".", 1)
    model: Description = getattr(import_module(f"nanoinfer.models.families.{file}"), function)(config)
    model.check_formats("model: the {} of quantization_config in its config")
    return model


def build(
    model: Description,
    max_model_len: int,
    backend: AttentionBackend,
    tp: TensorParallel,
    head_dtype: torch.dtype,
    place: Place = anywhere,
) -> CausalLM:
    """Build one rank's share of a model by the class that its description names; the weights hold any numbers.

    max_model_len: a sequence has at most so many tokens; head_dtype: of the logits and of the head's matrix
    place: where the layers' parameters get memory
    """
    file, name = model.module.rsplit(".", 1)
    made = getattr(import_module(file), name)(model, max_model_len, backend, tp, head_dtype, place)
    assert isinstance(made, CausalLM)
    return made
