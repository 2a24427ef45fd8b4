"""How llama.cpp's converter takes tensors of checkpoints apart, and how they come together again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Config = Mapping[str, Any]
Weights = dict[str, Tensor]
GATE_UP, DOWN = ".experts.gate_up_proj", ".experts.down_proj"
UP = ".experts.up_proj"
EXPERT = re.compile(r"\.experts\.(\d+)\.")


def apart(weights: Mapping[str, Tensor], config: Config) -> Weights:
    """Return tensors of which each is one of the file's, or one expert's part of it."""
    found: Weights = {}
    for name, tensor in weights.items():
        found |= _apart(name, tensor, config) or {name: tensor}
    return found


def together(found: Mapping[str, Tensor], weights: Mapping[str, Tensor], config: Config) -> Weights:
    """Return the tensors of a checkpoint from what `apart` made of such ones, `weights`, perhaps with other numbers."""
    whole = {}
    for name, tensor in weights.items():
        parts = _apart(name, tensor, config)
        if parts is None:
            whole[name] = found[name].reshape(tensor.shape)
            continue
        places = _apart(name, torch.arange(tensor.numel()).reshape(tensor.shape), config)
        flat = torch.empty(tensor.numel())
        for part, where in places.items():
            flat[where.flatten()] = found[part].float().flatten()
        whole[name] = flat.reshape(tensor.shape)
    return whole


def _apart(name: str, tensor: Tensor, config: Config) -> Weights | None:
    """Return the parts of a tensor; None: it stays as it is."""
    kind = config["model_type"]
    if kind == "gpt_oss" and ".experts." in name:
        return _pairs(name, tensor)
    if kind == "gemma4_text" and name.endswith((GATE_UP, DOWN)):
        return {f"{name}.weight": tensor}
    if name.endswith((GATE_UP, DOWN, UP)) and tensor.ndim == 3:
        return _one_by_one(name, tensor)
    if kind.startswith("granitemoe"):
        return _of_granite(name, tensor, config)
    if name.endswith("kv_b_proj.weight"):
        return _of_latents(name, tensor, config)
    if name.endswith("in_proj_qkvz.weight"):
        return _of_key_heads(name, tensor, config)
    return None


def _one_by_one(name: str, stack: Tensor) -> Weights:
    """Return each expert's matrices; files have gates and ups apart."""
    module, _, last = name.rpartition(".")
    projections = ["gate_proj", "up_proj"] if last == "gate_up_proj" else [last]
    return {
        f"{module}.{number}.{projection}.weight": matrix
        for number, expert in enumerate(stack)
        for projection, matrix in zip(projections, expert.chunk(len(projections)), strict=True)
    }


def _pairs(name: str, stack: Tensor) -> Weights:
    """Return the parts of gpt-oss's stacks: matrices are turned, and each gate is beside its up."""
    if name.endswith("_bias"):
        module, _, last = name.removesuffix("_bias").rpartition(".")
        parts = [stack[:, ::2], stack[:, 1::2]] if last == "gate_up_proj" else [stack]
        end = "bias"
    else:
        module, _, last = name.rpartition(".")
        stack = stack.mT
        parts = [stack[:, ::2], stack[:, 1::2]] if last == "gate_up_proj" else [stack]
        end = "weight"
    names = ["gate_proj", "up_proj"] if last == "gate_up_proj" else [last]
    return {f"{module}.{own}.{end}": part.contiguous() for own, part in zip(names, parts, strict=True)}


def _of_granite(name: str, tensor: Tensor, config: Config) -> Weights | None:
    """Return the parts of Granite's projections: an MLP is called so only where there are experts beside it."""
    layer, _, part = name.rpartition("layers.")[2].partition(".")
    is_alone = not config.get("num_local_experts")
    if part == "block_sparse_moe.input_linear.weight":
        gates, ups = tensor.chunk(2, dim=1)
        return {f"blk.{layer}.ffn_gate_exps.weight": gates, f"blk.{layer}.ffn_up_exps.weight": ups}
    end = "" if is_alone else "_shexp"
    if part == "shared_mlp.input_linear.weight":
        gate, up = tensor.chunk(2)
        return {f"blk.{layer}.ffn_gate{end}.weight": gate, f"blk.{layer}.ffn_up{end}.weight": up}
    if part == "shared_mlp.output_linear.weight":
        return {f"blk.{layer}.ffn_down{end}.weight": tensor}
    return None


def _of_latents(name: str, tensor: Tensor, config: Config) -> Weights:
    """Return the parts of DeepSeek's projections of keys and values: those of keys are turned."""
    keys, values = config["qk_nope_head_dim"], config["v_head_dim"]
    key, value = tensor.unflatten(0, (-1, keys + values)).split([keys, values], dim=1)
    return {name.replace("kv_b_proj", "k_b_proj"): key.mT, name.replace("kv_b_proj", "v_b_proj"): value}


def _of_key_heads(name: str, tensor: Tensor, config: Config) -> Weights:
    """Return the parts of Qwen3-Next's projection: queries, keys and values of all heads, and gates of all."""
    keys, size = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    q, k, v, z = tensor.unflatten(0, (keys, -1)).split([size, size, values, values], dim=1)
    layer = re.search(r"layers\.(\d+)\.", name)
    assert layer is not None
    qkv = torch.cat([part.flatten(0, 1) for part in (q, k, v)])
    return {f"blk.{layer[1]}.attn_qkv.weight": qkv, f"blk.{layer[1]}.attn_gate.weight": z.flatten(0, 1)}
