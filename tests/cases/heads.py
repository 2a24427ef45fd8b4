"""Checkpoints with a prediction head, and the head by its published definition (DeepSeek-V3, DeepSeek-AI, 2024)."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from cases import CASES
from cases.case import Case, build, save

SMALL = 0.003  # a factor of what layers add to the stream
ADDED = ("o_proj.weight", "down_proj.weight", "experts.down_proj")  # the ends of the names of what they add by
HEADS = {
    name: replace(CASES[name], settings={**CASES[name].settings, "num_nextn_predict_layers": 1})
    for name in ("glm4moe", "glm4moe groups, biases, norms, two dense layers", "deepseek-v3", "glm4moelite")
}


class Head(nn.Module):
    """x_p = projection [norm of token p + 1's embedding | norm of h_p], a decoder layer over all x, and a norm."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        config = deepcopy(model.config)
        config.num_hidden_layers, config.first_k_dense_replace, config.mlp_layer_types = 1, 0, ["sparse"]
        size, body = config.hidden_size, model.model
        self.enorm, self.hnorm, self.norm = (type(body.norm)(size, eps=config.rms_norm_eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.layer = type(body.layers[-1])(config, 0)
        self.body = [body]  # its weights are none of the head's

    def forward(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Return the head's hidden states, [n, size]; tokens: [n], the next ones; hidden: [n, size], from the first."""
        (body,), count = self.body, len(tokens)
        joined = torch.cat([self.enorm(body.embed_tokens(tokens)), self.hnorm(hidden)], dim=-1)
        x, places = self.eh_proj(joined)[None], torch.arange(count)[None]
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        turned = body.rotary_emb(x, position_ids=places)
        out = self.layer(x, attention_mask=mask, position_ids=places, position_embeddings=turned)
        return self.norm(out[0] if isinstance(out, tuple) else out)[0]

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """Return its tensors, as published files have them; prefix: of their names"""
        named = dict(self.state_dict())
        named["shared_head.norm.weight"] = named.pop("norm.weight")
        for name in [name for name in named if ".experts." in name]:
            for number, matrix in enumerate(named.pop(name)):
                parts = matrix.chunk(2) if name.endswith("gate_up_proj") else [matrix]
                kinds = ("gate_proj", "up_proj") if len(parts) > 1 else ("down_proj",)
                for kind, part in zip(kinds, parts, strict=True):
                    named[f"layer.mlp.experts.{number}.{kind}.weight"] = part
        return {prefix + name.removeprefix("layer."): tensor.contiguous() for name, tensor in named.items()}


def build_with_head(case: Case, folder: Path, agrees: bool = False) -> tuple[PreTrainedModel, Head]:
    """Save a checkpoint of random weights that has a head; returns transformers' model of it, and the head.

    agrees: nearly all of the next token comes from the last one's embedding, in the model as in the head
    """
    model = build(case, folder)
    head = Head(model).float().eval()
    for name, tensor in head.state_dict().items():
        if tensor.ndim > 1:
            nn.init.normal_(tensor, std=1.4 / tensor.shape[1] ** 0.5)
        else:
            nn.init.uniform_(tensor, *((-0.9, 0.3) if name.endswith("bias") else (0.5, 1.5)))
    if agrees:
        _let_agree(model, head)
    save(model, folder)
    prefix = f"model.layers.{model.config.num_hidden_layers}."
    copies = {"embed_tokens": model.model.embed_tokens, "shared_head.head": model.lm_head}
    tensors = {f"{prefix}{name}.weight": module.weight.detach().clone() for name, module in copies.items()}
    stored = load_file(folder / "model.safetensors")
    save_file({**stored, **tensors, **head.tensors(prefix)}, folder / "model.safetensors", {"format": "pt"})
    return model, head


@torch.no_grad()
def _let_agree(model: PreTrainedModel, head: Head) -> None:
    for module in (model, head):
        for name, parameter in module.named_parameters():
            if name.endswith(ADDED):
                parameter *= SMALL
    size = model.config.hidden_size
    head.eh_proj.weight *= SMALL
    head.eh_proj.weight[:, :size] += torch.eye(size)
    head.enorm.weight.fill_(1)
    head.norm.weight.copy_(model.model.norm.weight)
