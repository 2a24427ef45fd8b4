"""Checkpoints that are read: sentence-transformers' files around small models of random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedModel

from nanoinfer import BUNDLED_MODEL

PROMPTS = {"query": "Find what answers: ", "document": ""}
TEXTS = ["a", "To be, or not", "Now is the winter of our discontent made glorious summer by this sun", "ROMEO: I do"]
END = 1  # the token that the tokenizer's post-processor adds


def add_tokenizer(folder: str) -> None:
    """Save the bundled tokenizer, which adds a token to each text, as that of Qwen3-Embedding does."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    end = tokenizer.convert_ids_to_tokens(END)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"$A {end}", special_tokens=[(end, END)])
    tokenizer.pad_token = end
    tokenizer.chat_template = None  # or sentence-transformers would take each text for a message
    tokenizer.save_pretrained(folder)


def save_sentence_model(
    model: PreTrainedModel,
    folder: Path,
    pooling: str = "lasttoken",
    normalises: bool = True,
    dense: dict[str, Any] | None = None,
    norm: bool = False,
    **settings: Any,
) -> str:
    """Save a checkpoint as sentence-transformers does; returns its folder.

    dense: Dense's arguments, if there is one; norm: there is a LayerNorm of random numbers
    """
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    sentence_transformers = pytest.importorskip("sentence_transformers")
    bare = folder / "bare"
    model.save_pretrained(bare)
    add_tokenizer(str(bare))
    parts = [modules.Transformer(str(bare)), modules.Pooling(model.config.hidden_size, pooling)]
    if dense is not None:
        parts.append(modules.Dense(in_features=model.config.hidden_size, **dense))
    if norm:
        parts.append(modules.LayerNorm(model.config.hidden_size))
        for parameter in parts[-1].parameters():
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    parts += [modules.Normalize()] * normalises
    whole = folder / "whole"
    sentence_transformers.SentenceTransformer(modules=parts, device="cpu", **settings).save(str(whole))
    return str(whole)


def change_json(folder: str, name: str, **values: Any) -> None:
    """Change settings of a file of JSON in a folder; None takes one out."""
    file = Path(folder) / name
    known = {**json.loads(file.read_text("utf-8")), **values}
    file.write_text(json.dumps({key: value for key, value in known.items() if value is not None}), "utf-8")


def spread_norms(model: PreTrainedModel) -> None:
    """Let no norm's weights be ones, which would hide a norm that is not applied."""
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
