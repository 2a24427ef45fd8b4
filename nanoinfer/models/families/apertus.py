"""Apertus (Swiss AI, 2025): MLPs without gates, whose activation each layer has learned; and Apertus 1.5 (2026)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nanoinfer.models.description import Description
from nanoinfer.models.module_names import ModuleNames
from nanoinfer.models.reading.settings import refuse, size_of
from nanoinfer.models.reading.shared import describe_common, refuse_windows

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAMES = ModuleNames(
    attention_norm="attention_layernorm",
    mlp_norm="feedforward_layernorm",
    gate_up=("mlp.up_proj",),
)


def describe(config: PretrainedConfig) -> Description:
    """Describe an Apertus; its hidden_act may name a plain activation, too."""
    refuse_windows(config)
    learns = config.hidden_act == "xielu"
    return describe_common(
        config,
        activation_field=None if learns else "hidden_act",
        names=replace(NAMES, xielu="mlp.act_fn") if learns else NAMES,
        is_gated=False,
        qk_norm="head",
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
    )


def describe_1p5(config: PretrainedConfig) -> Description:
    """Describe the text part of an Apertus 1.5, which may continue texts only by the first of the ids that it reads."""
    model = describe(config)
    if config.output_vocab_size in (None, config.vocab_size):
        return model
    refuse(config, tie_word_embeddings=False)
    count = size_of(config, "output_vocab_size")
    if count > config.vocab_size:
        raise ValueError(
            f"model: output_vocab_size={count} in its config: must be at most vocab_size={config.vocab_size}"
        )
    return replace(model, vocab_size=count, embedded_ids=config.vocab_size)
