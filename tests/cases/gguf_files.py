"""Writes GGUF files of small checkpoints, as llama.cpp's converter does, by the package gguf."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cases.gguf_layouts import EXPERT, apart, together
from cases.gguf_metadata import metadata_of, rotations_of

ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "cohere": "command-r",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "ernie4_5_moe": "ernie4_5-moe",
    "gemma4_text": "gemma4",
    "glm4_moe": "glm4moe",
    "glm4_moe_lite": "deepseek2",
    "gpt_oss": "gpt-oss",
    "granitemoehybrid": "granitehybrid",
    "granitemoeshared": "granitemoe",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "lfm2_moe": "lfm2moe",
    "minimax_m2": "minimax-m2",
    "ministral3": "mistral3",
    "olmo3": "olmo2",
    "qwen3_next": "qwen3next",
}
MAMBA = ("granitehybrid", "nemotron_h", "nemotron_h_moe")
IN_PAIRS = ("arcee", "llama", "granite", "granitemoe", "mistral3", "smollm3", *MAMBA)
TILED = ("qwen35", "qwen35moe")
LAYERS = 8  # more than any case has
SPELLED = (
    (r"\.dt_bias$", ".dt_proj.bias"),
    (r"e_score_correction_bias$", "e_score_correction.bias"),
    (r"\.expert_bias$", ".expert_bias.bias"),
    (r"(sinks|layer_scalar)$", r"\1.weight"),
    (r"^model\.(layers\.\d+\.feed_forward\.experts\.)", r"\1"),
    (r"^backbone(\.layers\.\d+)\.mixer\.experts\.", r"model\1.mlp.experts."),
)
NORMS_MORE = ("gemma", "gemma2", "gemma3", "nemotron", "qwen3next", *TILED)
Types = Callable[[str, tuple[int, ...]], str]  # of tensors' names in the file, and their shapes


def plain(name: str, shape: tuple[int, ...]) -> str:
    """Let all tensors stay as they are."""
    return "F32"


def write_gguf(
    folder: Path,
    file: Path,
    types: Types = plain,
    metadata: Mapping[str, Any] | None = None,
    split: int = 0,
    architecture: str | None = None,
) -> None:
    """Write a folder's checkpoint to a file. The folder then has what the file stands for.

    types: of the tensors; metadata: further ones, or others, without the architecture before their names
    split: so many tensors in each of several files; 0: all in one
    architecture: what the file calls it; None: as the config's model_type
    """
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    architecture = architecture or ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(file, architecture, split_max_tensors=split)
    for key, value in {**metadata_of(config), **(metadata or {})}.items():
        add(writer, key if key.startswith(("tokenizer.", "general.", "split.")) else f"{architecture}.{key}", value)
    for name, numbers in rotations_of(config).items():
        writer.add_tensor(name, numbers.numpy().astype(np.float32))
    parts = apart(weights, config)
    found: dict[str, Tensor] = {}
    for name, members in stored_names(architecture, parts).items():
        changed = [change(parts[member], name, architecture, config) for member in members]
        stacked = torch.stack(changed) if EXPERT.search(members[0]) else changed[0]
        kind = gguf.GGMLQuantizationType[types(name, tuple(stacked.shape))]
        blocks = make_blocks(stacked.contiguous().numpy(), kind)
        writer.add_tensor(name, blocks, raw_dtype=kind)
        numbers = torch.from_numpy(np.array(gguf.dequantize(blocks, kind))).reshape(stacked.shape)
        back = numbers.unbind() if EXPERT.search(members[0]) else [numbers]
        for member, one in zip(members, back, strict=True):
            found[member] = change_back(one, name, architecture, config, parts[member].shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    stands_for = {name: tensor.contiguous() for name, tensor in together(found, weights, config).items()}
    save_file(stands_for, folder / "model.safetensors", {"format": "pt"})


def in_type(kind: str) -> Types:
    """Let all matrices that can have a type have it."""

    def type_of(name: str, shape: tuple[int, ...]) -> str:
        size, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        is_kept = len(shape) == 1 or shape[-1] % size != 0 or "ffn_gate_inp" in name
        return "F32" if is_kept else kind

    return type_of


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add metadata."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def stored_names(architecture: str, weights: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return the tensors' names in the file, and those of a checkpoint, of which a stack has several."""
    (number,) = (number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(number, LAYERS)
    names: dict[str, list[str]] = {}
    for name in sorted(weights, key=lambda name: int(found[1]) if (found := EXPERT.search(name)) else 0):
        stored = name if name.startswith("blk.") else stored_name(name, table)
        names.setdefault(stored, []).append(name)
    return names


def stored_name(name: str, table: gguf.TensorNameMap) -> str:
    """Return a tensor's name in the file."""
    spelled = EXPERT.sub(".experts.", name)
    for pattern, part in SPELLED:
        spelled = re.sub(pattern, part, spelled)
    layer = re.search(r"layers\.(\d+)\.router\.(scale|per_expert_scale)$", name)
    if layer is not None:
        return f"blk.{layer[1]}.{'ffn_gate_inp' if layer[2] == 'scale' else 'ffn_down_exps'}.scale"
    stored = table.get_name(spelled, try_suffixes=(".weight", ".bias"))
    assert stored is not None, spelled
    return str(stored)


def heads_of(name: str, architecture: str, config: Mapping[str, Any]) -> int:
    """Return how many heads' rows are stored pair by pair; 0: they are not."""
    if architecture not in IN_PAIRS:
        return 0
    kinds = {".attn_q.": "num_attention_heads", ".attn_k.": "num_key_value_heads"}
    return next((config[setting] for kind, setting in kinds.items() if kind in name), 0)


def adds_one(name: str, architecture: str) -> bool:
    """Return whether the file has one more than the checkpoint."""
    return architecture in NORMS_MORE and name.endswith("norm.weight") and "ssm_norm" not in name


def tiles_of(name: str, config: Mapping[str, Any]) -> Tensor | None:
    """Return which of a checkpoint's rows, or of ssm_out's columns, each of the file's is; None: all lie alike.

    The converter has the first value head of each key, then the second of each, and so on.
    """
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    heads_in_order = [key * (heads // keys) + value for value in range(heads // keys) for key in range(keys)]
    if any(part in name for part in ("ssm_alpha", "ssm_beta", "ssm_dt", "ssm_a")):
        return torch.tensor(heads_in_order)
    size = config["linear_value_head_dim"]
    values = [head * size + place for head in heads_in_order for place in range(size)]
    if "attn_gate" in name or "ssm_out" in name:
        return torch.tensor(values)
    if "attn_qkv" in name or "ssm_conv1d" in name:
        fixed = 2 * keys * config["linear_key_head_dim"]
        return torch.tensor([*range(fixed), *(fixed + value for value in values)])
    return None


def change(tensor: Tensor, name: str, architecture: str, config: Mapping[str, Any]) -> Tensor:
    """Return what the file has of a checkpoint's tensor."""
    tensor = tensor.float()
    if architecture in TILED and (order := tiles_of(name, config)) is not None:
        tensor = tensor[:, order] if "ssm_out" in name else tensor[order]
        return -tensor.exp() if name.endswith("ssm_a") else tensor.squeeze(1) if tensor.dim() == 3 else tensor
    if name.endswith("ssm_a"):
        tensor = -tensor.exp()
    if architecture in MAMBA and name.endswith(("ssm_a", "ssm_d")):
        return tensor[:, None]
    if architecture in MAMBA and "ssm_norm" in name:
        return tensor.unflatten(0, (config.get("mamba_n_groups") or config["n_groups"], -1))
    if heads := heads_of(name, architecture, config):
        return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    if adds_one(name, architecture):
        return tensor + 1
    is_convolution = "conv" in name and tensor.dim() == 3
    return tensor.squeeze(1) if is_convolution else tensor.squeeze(0) if tensor.dim() == 2 else tensor


def change_back(tensor: Tensor, name: str, architecture: str, config: Mapping[str, Any], shape: torch.Size) -> Tensor:
    """Return the checkpoint's tensor of what the file has."""
    if name.endswith("ssm_a"):
        tensor = tensor.neg().log()
    if architecture in TILED and (order := tiles_of(name, config)) is not None:
        tensor = tensor[:, order.argsort()] if "ssm_out" in name else tensor[order.argsort()]
        return tensor.reshape(shape)
    if heads := heads_of(name, architecture, config):
        return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    return (tensor - 1 if adds_one(name, architecture) else tensor).reshape(shape)


def make_blocks(numbers: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Return numbers in a type; of those that gguf does not write, random blocks that are about as large."""
    try:
        return gguf.quantize(numbers, kind)
    except NotImplementedError:
        return random_blocks(numbers.shape, float(numbers.std()), kind)


def random_blocks(shape: tuple[int, ...], spread: float, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Return blocks of any bits, whose scales are such that numbers spread so."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(5)
    blocks = generator.integers(0, 256, (math.prod(shape) // size, num_bytes), dtype=np.uint8)
    for place in HALVES[kind.name]:
        halves = generator.uniform(0.5, 1.5, len(blocks)).astype(np.float16)
        blocks[:, place : place + 2] = halves[:, None].view(np.uint8)
    scale = spread / np.std(gguf.dequantize(blocks, kind))
    for place in HALVES[kind.name]:
        halves = (blocks[:, place : place + 2].copy().view(np.float16) * scale).astype(np.float16)
        blocks[:, place : place + 2] = halves.view(np.uint8)
    return blocks.reshape(*shape[:-1], shape[-1] // size * num_bytes)


HALVES = {  # where blocks have their scales in float16
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
