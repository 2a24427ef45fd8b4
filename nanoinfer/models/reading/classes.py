"""The classes that read texts and do not continue them: decoders without a head, encoders, and classifiers of texts."""

from __future__ import annotations

from dataclasses import replace

from nanoinfer.models.description import HEAD, Description

BARE = {
    "Gemma2Model": "Gemma2ForCausalLM",
    "Gemma3TextModel": "Gemma3ForCausalLM",
    "LlamaModel": "LlamaForCausalLM",
    "MistralModel": "MistralForCausalLM",
    "Qwen2Model": "Qwen2ForCausalLM",
    "Qwen3Model": "Qwen3ForCausalLM",
}
"""Maps a decoder without a head to the class that has the same decoder, and generates."""

CLASSIFIERS = {
    f"{stem}ForSequenceClassification": f"{stem}ForCausalLM"
    for stem in ("Gemma2", "Llama", "Mistral", "Qwen2", "Qwen3")
}
"""The same for classifiers, which score a text by its last token."""

STEMS = ("Bert", "DistilBert", "Electra", "ModernBert", "MPNet", "Roberta", "XLMRoberta")
OF_ENCODERS = {f"{stem}{kind}": f"{stem}Model" for stem in STEMS for kind in ("Model", "ForMaskedLM")}
OF_ENCODERS |= {f"{stem}ForPreTraining": f"{stem}Model" for stem in ("Bert", "Electra")}
OF_ENCODERS |= {name: name for name in ("EmbeddingGemma2Model", "EmbeddingGemma2TextModel")}
"""Maps an encoder, with or without a head that guesses tokens, to the class that stands for both."""

ENCODING_CLASSIFIERS = {f"{stem}ForSequenceClassification": f"{stem}Model" for stem in STEMS}
"""The same for classifiers, which score a text by its first token, or by the mean."""

OLD_NAMES = {"MPTForCausalLM": "MptForCausalLM", "PhiMoEForCausalLM": "PhimoeForCausalLM"}
"""Maps the name that the authors' own code gave to a class to transformers'."""

LACKING = {
    "BailingHybridForCausalLM": "lightning attention",
    "DeepseekV32ForCausalLM": "sparse indexers",
    "DeepseekV4ForCausalLM": "hyper-connections",
    "GlmMoeDsaForCausalLM": "sparse indexers",
    "JambaForCausalLM": "Mamba's first version",
    "KimiLinearForCausalLM": "Kimi Delta Attention",
    "Zamba2ForCausalLM": "layers that share their weights",
}
"""Relatives of classes here, with latent attention or Mamba2, and what they have that nanoinfer lacks."""

ALL_CLASSIFIERS = CLASSIFIERS | ENCODING_CLASSIFIERS
READERS = BARE | OF_ENCODERS | ALL_CLASSIFIERS


def described_as(name: str) -> str:
    """Return the class by whose description a class is built; it may be `name`."""
    return (READERS | OLD_NAMES).get(name, name)


def read_only(model: Description, labels: int) -> Description:
    """Return a model that reads texts. labels: how many scores a text gets; 0: it has hidden states alone"""
    skipped = *model.skipped, f"{HEAD}."
    if model.text_head is not None and not labels:
        skipped += model.text_head.modules
    return replace(model, tied=False, logit_scale=1.0, logit_cap=None, labels=labels, skipped=skipped)
