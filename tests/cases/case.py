"""Case: a small model of a class, and how its checkpoint is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers.models.falcon.modeling_falcon as falcon
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedModel

from nanoinfer.models.attention.alibi import alibi_slopes

VOCAB = 160
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2],
    "long_factor": [1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0],
}


@dataclass
class Case:
    """A class that config.json may name, with the model_type and the settings to try."""

    architecture: str
    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] | None = None  # of a multimodal checkpoint, whose text_config has the settings
    keeps_states: bool = False  # some layers do
    outer: dict[str, Any] = field(default_factory=dict)  # of a multimodal config, beside text_config and vision_config

    @property
    def text_settings(self) -> dict[str, Any]:
        """Return the settings of the language model."""
        settings = {**SHAPE, **self.settings}
        if self.model_type in ("qwen2_vl", "qwen2_5_vl", "falcon"):
            settings.pop("head_dim")  # transformers computes it from the hidden size
        return settings

    @property
    def small(self) -> dict[str, int]:
        """Options with blocks as small as can be."""
        return {"kvcache_block_size": 64 if self.keeps_states else 16, "max_model_len": 320}

    @property
    def tight(self) -> dict[str, int]:
        """Options with a cache so small that sequences are preempted, and prompts in chunks."""
        blocks, tokens = (6, 100) if self.keeps_states else (21, 50)
        return {**self.small, "num_kvcache_blocks": blocks, "max_num_batched_tokens": tokens}


def rounded_slopes(attention_mask: torch.Tensor, heads: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a Falcon's biases of slopes in 16 bits; transformers rounds their products with positions, too."""
    slopes = torch.tensor(alibi_slopes(heads)).bfloat16().to(dtype)
    return slopes[:, None, None] * torch.arange(attention_mask.shape[1], dtype=dtype)


falcon.build_alibi_tensor = rounded_slopes


def build(case: Case, folder: Path) -> PreTrainedModel:
    """Save a checkpoint of random weights, norms and biases included; returns transformers' model of it."""
    torch.manual_seed(0)
    settings = case.text_settings
    if case.vision is not None:
        tied = {"tie_word_embeddings": settings.pop("tie_word_embeddings")} if "tie_word_embeddings" in settings else {}
        seeing = {"vision_config": case.vision} if case.vision else {}  # or the model hears
        settings = {"text_config": settings, **seeing, **tied, **case.outer}
    config = AutoConfig.for_model(case.model_type, **settings)
    is_multimodal = case.vision is not None or case.model_type == "mistral4"  # which transformers lists there alone
    auto = AutoModelForMultimodalLM if is_multimodal else AutoModelForCausalLM
    # transformers' own attention would add a Falcon's biases twice.
    attention = "sdpa" if case.model_type == "falcon" else "eager"
    model = auto.from_config(config, attn_implementation=attention).float().eval()
    assert type(model).__name__ == case.architecture
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            torch.nn.init.uniform_(buffer, 0.5, 1.5)
        elif name.endswith("down_proj.input_max"):  # the other limits of Gemma 4's tower are infinite
            buffer.fill_(0.1)
    for name, parameter in model.named_parameters():
        # Heads forget slowly: the norm of a head whose sum is near 0 would enlarge its error.
        if name.endswith("A_log"):
            torch.nn.init.uniform_(parameter, -5, -2)
        elif parameter.ndim == 1:
            low, high = (0.5, 1.5) if parameter.min() == 1 else (-0.3, 0.3)  # a norm; else Gemma's norm, or a bias
            torch.nn.init.uniform_(parameter, low, high)
        elif "visual" not in name and "vision" not in name:
            torch.nn.init.normal_(parameter, std=1.4 / parameter.shape[1] ** 0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("_bias"):  # corrections of routers' scores, which then may be negative
            torch.nn.init.uniform_(buffer, -0.9, 0.3)
    save(model, folder)
    return model


def save(model: PreTrainedModel, folder: Path) -> None:
    """Save a model of transformers, as published files have it."""
    model.save_pretrained(folder)
    if model.config.model_type == "olmo_hybrid":
        _cut_convolutions(model, folder / "model.safetensors")


def _cut_convolutions(model: PreTrainedModel, file: Path) -> None:
    """Let the convolutions of queries, keys and values have the sizes that published files have; saved are thirds."""
    weights = load_file(file)
    for number, layer in enumerate(model.model.layers):
        mixer = getattr(layer, "linear_attn", None)
        if mixer is not None:
            parts = mixer.conv1d.weight.detach().split([mixer.key_dim, mixer.key_dim, mixer.value_dim])
            for name, part in zip("qkv", parts, strict=True):
                weights[f"model.layers.{number}.linear_attn.{name}_conv1d.weight"] = part.contiguous()
    save_file(weights, file, {"format": "pt"})
