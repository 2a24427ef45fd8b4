"""Tuned: a model with an adapter of random numbers, as tensors for an LLM and merged into transformers' model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from conftest import Oracle
from safetensors.torch import save_file
from torch import Tensor

ALPHA = 6.0


class Tuned(Oracle):
    """A model whose linear layers have an adapter.

    tensors: the adapter's, by PEFT's names
    """

    def __init__(self, folder: str, seed: int, rank: int = 4, only: str = "_proj", std: float = 0.2) -> None:
        """only: a part of the names of the matrices that the adapter changes; std: of its numbers"""
        super().__init__(folder)
        self.rank, self.tensors = rank, dict[str, Tensor]()
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.model.named_parameters():
            module = name.removesuffix(".weight")
            if only in module and module.endswith("_proj"):
                a = torch.randn(rank, weight.shape[1], generator=generator) * std
                b = torch.randn(weight.shape[0], rank, generator=generator) * std
                weight.data += ALPHA / rank * b @ a
                self.tensors[f"base_model.model.{module}.lora_A.weight"] = a
                self.tensors[f"base_model.model.{module}.lora_B.weight"] = b

    def save(self, folder: Path) -> str:
        """Write the adapter as PEFT does; returns the folder."""
        folder.mkdir(exist_ok=True)
        config: dict[str, Any] = {"peft_type": "LORA", "r": self.rank, "lora_alpha": ALPHA}
        (folder / "adapter_config.json").write_text(json.dumps({**config, "target_modules": "all-linear"}))
        save_file(self.tensors, folder / "adapter_model.safetensors")
        return str(folder)

    def agrees(self, tokens: list[int], start: int, end: int | None = None) -> bool:
        """Whether tokens `start` to `end` are those that greedy decoding draws behind the tokens before them."""
        best = self.logits(tokens).argmax(1).tolist()
        return best[start - 1 : -1 if end is None else end - 1] == tokens[start:end]
