"""The classes that read texts and do not continue them: decoders without a head, and classifiers of texts."""

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


def generating(name: str) -> str:
    """Return the class that has the decoder of `name`, and generates; it may be `name`."""
    return BARE.get(name) or CLASSIFIERS.get(name, name)


def read_only(model: Description, labels: int) -> Description:
    """Return a model that reads texts. labels: how many scores a text gets; 0: it has hidden states alone"""
    skipped = *model.skipped, f"{HEAD}."
    return replace(model, tied=False, logit_scale=1.0, logit_cap=None, labels=labels, skipped=skipped)
