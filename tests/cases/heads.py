"""Checkpoints with prediction heads, and these by their published definition (DeepSeek-V3, DeepSeek-AI, 2024)."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from cases import CASES
from cases.case import Case, build, save
from nanoinfer.runner.drafting.head_steps import HeadSteps

SMALL = 0.003  # a factor of what layers add to the stream
# The ends of the names of what they add by.
ADDED = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")
HEADS = {
    name: replace(CASES[name], settings={**CASES[name].settings, "num_nextn_predict_layers": 1})
    for name in ("glm4moe", "glm4moe groups, biases, norms, two dense layers", "deepseek-v3", "glm4moelite")
}
QWEN = {
    name: replace(CASES[name], settings={**CASES[name].settings, setting: 1})
    for name, setting in (
        ("qwen3.5", "mtp_num_hidden_layers"),
        ("qwen3.5moe", "mtp_num_hidden_layers"),
        ("qwen3next", "num_nextn_predict_layers"),
        ("qwen3.5 multimodal", "mtp_num_hidden_layers"),
    )
}

Drawn = tuple[int, int, Tensor]  # of a position: the token that a head takes, and its hidden state there
MIMO = {name: CASES[name] for name in CASES if name.startswith("mimo-v2")}
WINDOW = "sliding_attention"
# What files call what Head.state_dict calls otherwise: how names begin in both, by the beginning of the model's type.
USUAL_NAMES = {"norm.weight": "shared_head.norm.weight", "layer.": ""}
FILE_NAMES = {
    "mimo": {
        "norm.weight": "final_layernorm.weight",
        "layer.post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
        "layer.self_attn.sinks": "self_attn.attention_sink_bias",
        "layer.": "",
    },
    "qwen": {
        "enorm.": "pre_fc_norm_embedding.",
        "hnorm.": "pre_fc_norm_hidden.",
        "eh_proj.": "fc.",
        "layer.": "layers.0.",
    },
}


class Head(nn.Module):
    """x_p = projection [norm of a token's embedding | norm of h_p], a decoder layer over all x, and a norm.

    It is the token at p + 1, or of several heads, the token at p + 1 + k for head k.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        config, body = deepcopy(model.config.get_text_config()), body_of(model)
        config.num_hidden_layers, config.first_k_dense_replace, config.mlp_layer_types = 1, 0, ["sparse"]
        config.layer_types, size = ["full_attention"], config.hidden_size
        self.window = config.sliding_window if config.model_type == "mimo_v2_flash" else None
        if self.window:
            config.layer_types, config.mlp_layer_types = [WINDOW], ["dense"]
        self.names = next((own for kind, own in FILE_NAMES.items() if config.model_type.startswith(kind)), USUAL_NAMES)
        self.enorm, self.hnorm, self.norm = (type(body.norm)(size, eps=config.rms_norm_eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.layer = type(body.layers[-1])(config, 0)
        self.body = [body]  # its weights are none of the head's

    def forward(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Return the head's hidden states, [n, size]; tokens: [n]; hidden: [n, size], from the first."""
        (body,), count = self.body, len(tokens)
        joined = torch.cat([self.enorm(body.embed_tokens(tokens)), self.hnorm(hidden)], dim=-1)
        x, places = self.eh_proj(joined)[None], torch.arange(count)[None]
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        if self.window:
            mask += torch.full((count, count), -torch.inf).tril(-self.window)
        turned = body.rotary_emb(x, places, *([WINDOW] if self.window else []))
        out = self.layer(x, attention_mask=mask, position_ids=places, position_embeddings=turned)
        return self.norm(out[0] if isinstance(out, tuple) else out)[0]

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """Return its tensors, as published files have them; prefix: of their names"""
        named = dict(self.state_dict())
        for name in [name for name in named if ".experts." in name]:
            for number, matrix in enumerate(named.pop(name)):
                parts = matrix.chunk(2) if name.endswith("gate_up_proj") else [matrix]
                kinds = ("gate_proj", "up_proj") if len(parts) > 1 else ("down_proj",)
                for kind, part in zip(kinds, parts, strict=True):
                    named[f"layer.mlp.experts.{number}.{kind}.weight"] = part
        return {prefix + self._in_files(name): tensor.contiguous() for name, tensor in named.items()}

    def _in_files(self, name: str) -> str:
        begin, theirs = next((pair for pair in self.names.items() if name.startswith(pair[0])), ("", ""))
        return theirs + name[len(begin) :]


def body_of(model: PreTrainedModel) -> nn.Module:
    """Return the decoder of a model of transformers, without its output projection."""
    return getattr(model.model, "language_model", model.model)


def build_with_head(case: Case, folder: Path, agrees: bool = False) -> tuple[PreTrainedModel, Head]:
    """Save a checkpoint of random weights that has a head; returns transformers' model of it, and the head.

    agrees: nearly all of the next token comes from the last one's embedding, in the model as in the head
    """
    model, (head,) = _make(case, folder, SMALL if agrees else None, 1)
    if case.model_type.startswith("qwen"):
        add_tensors(folder, head.tensors("mtp."))
        return model, head
    prefix = f"model.layers.{model.config.num_hidden_layers}."
    copies = {"embed_tokens": model.model.embed_tokens, "shared_head.head": model.lm_head}
    tensors = {f"{prefix}{name}.weight": module.weight.detach().clone() for name, module in copies.items()}
    add_tensors(folder, {**tensors, **head.tensors(prefix)})
    return model, head


def build_with_heads(case: Case, folder: Path, small: float = SMALL) -> tuple[PreTrainedModel, list[Head]]:
    """Save a checkpoint that has three heads, as MiMo-V2-Flash's; returns transformers' model of it, and the heads.

    small: a factor of what layers add to the last token's embedding: the smaller, the more often heads are right
    """
    model, heads = _make(case, folder, small, 3)
    for number, head in enumerate(heads):
        add_tensors(folder, head.tensors(f"model.mtp.layers.{number}."))
    return model, heads


def add_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Add tensors to those of a checkpoint's file."""
    stored = load_file(folder / "model.safetensors")
    save_file({**stored, **tensors}, folder / "model.safetensors", {"format": "pt"})


def _make(case: Case, folder: Path, small: float | None, count: int) -> tuple[PreTrainedModel, list[Head]]:
    model = build(case, folder)
    heads = [Head(model).float().eval() for _ in range(count)]
    for name, tensor in (named for head in heads for named in head.state_dict().items()):
        if tensor.ndim > 1:
            nn.init.normal_(tensor, std=1.4 / tensor.shape[1] ** 0.5)
        else:
            nn.init.uniform_(tensor, *((-0.9, 0.3) if name.endswith("bias") else (0.5, 1.5)))
    if small is not None:
        _let_agree(model, heads, small)
    save(model, folder)
    return model, heads


@torch.no_grad()
def _let_agree(model: PreTrainedModel, heads: list[Head], small: float) -> None:
    for module in (model, *heads):
        for name, parameter in module.named_parameters():
            if name.endswith(ADDED):
                parameter *= small
    size, last_norm = model.config.get_text_config().hidden_size, body_of(model).norm
    for head in heads:
        head.eh_proj.weight *= small
        head.eh_proj.weight[:, :size] += torch.eye(size)
        head.enorm.weight.copy_(type(last_norm)(size).weight)
        head.norm.weight.copy_(last_norm.weight)


def record_rounds(monkeypatch: pytest.MonkeyPatch) -> list[list[Drawn]]:
    """Return a list that gets what heads compute for the guesses of each verifying step. Steps have one row."""
    rounds, propose, draw = list[list[Drawn]](), HeadSteps.propose, HeadSteps._draw_all

    def propose_and_tell(self: HeadSteps, *sizes: int) -> tuple[Tensor, Tensor]:
        rounds.append([])
        return propose(self, *sizes)

    def draw_and_tell(
        self: HeadSteps, number: int, tokens: Tensor, positions: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor]:
        drawn, after = draw(self, number, tokens, positions, *rest)
        if rounds:
            rounds[-1].append((int(positions[0]), int(tokens[0]), after[0].clone()))
        return drawn, after

    monkeypatch.setattr(HeadSteps, "propose", propose_and_tell)
    monkeypatch.setattr(HeadSteps, "_draw_all", draw_and_tell)
    return rounds
