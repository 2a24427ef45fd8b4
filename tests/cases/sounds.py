"""A small model that hears, with its processor, and sounds of noise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedModel, Qwen2AudioProcessor, WhisperFeatureExtractor

from cases.case import build
from cases.multimodal import EARS, MULTIMODAL
from nanoinfer import BUNDLED_MODEL

RATE, VOCAB = 16000, 2080
AUDIO, BEGIN, END = "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"
PROMPT = f"{BEGIN}{AUDIO}{END}"  # what stands for a sound in a prompt
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'audio' %}" + PROMPT + "{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
)


def sound(samples: int, seed: int = 0) -> np.ndarray:
    """Return noise that differs from others in each sample."""
    return np.random.default_rng(seed).uniform(-0.5, 0.5, samples).astype(np.float32)


def make_processor() -> Any:
    """Return transformers' processor."""
    names = {"audio_token": AUDIO, "audio_bos_token": BEGIN, "audio_eos_token": END}
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL, extra_special_tokens=names)
    tokenizer.chat_template = CHAT_TEMPLATE
    extractor = WhisperFeatureExtractor(feature_size=EARS["num_mel_bins"], chunk_length=1)
    return Qwen2AudioProcessor(extractor, tokenizer, CHAT_TEMPLATE)


def build_hearing(folder: Path) -> PreTrainedModel:
    """Save a checkpoint of random weights with its processor; returns transformers' model of it."""
    processor, case = make_processor(), MULTIMODAL["qwen2-audio"]
    outer = {**case.outer, "audio_token_index": processor.audio_token_id}
    model = build(replace(case, settings={**case.settings, "vocab_size": VOCAB}, outer=outer), folder)
    processor.feature_extractor.save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    return model
