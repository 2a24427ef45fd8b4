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

ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}
IN_PAIRS = ("llama", "granite")
TILED = ("qwen35", "qwen35moe")
NORMS_MORE = ("gemma", "gemma2", "gemma3", "nemotron", *TILED)
STACKS = ".experts.gate_up_proj", ".experts.down_proj"
EXPERT = re.compile(r"\.experts\.(\d+)\.")
SETTINGS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "norm_eps": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
Types = Callable[[str, tuple[int, ...]], str]  # of tensors' names in the file, and their shapes


def plain(name: str, shape: tuple[int, ...]) -> str:
    """Let all tensors stay as they are."""
    return "F32"


def write_gguf(
    folder: Path, file: Path, types: Types = plain, metadata: Mapping[str, Any] | None = None, split: int = 0
) -> None:
    """Write a folder's checkpoint to a file. The folder then has what the file stands for.

    types: of the tensors; metadata: further ones, or others, without the architecture before their names
    split: so many tensors in each of several files; 0: all in one
    """
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    architecture = ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(file, architecture, split_max_tensors=split)
    for key, value in {**metadata_of(config), **(metadata or {})}.items():
        add(writer, key if key.startswith(("tokenizer.", "general.")) else f"{architecture}.{key}", value)
    for name, numbers in rotations_of(config).items():
        writer.add_tensor(name, numbers.numpy().astype(np.float32))
    stands_for = dict(weights)
    weights = one_by_one(weights)
    for name, members in stored_names(architecture, config["num_hidden_layers"], weights).items():
        changed = [change(weights[member], name, architecture, config) for member in members]
        stacked = torch.stack(changed) if EXPERT.search(members[0]) else changed[0]
        kind = gguf.GGMLQuantizationType[types(name, tuple(stacked.shape))]
        blocks = make_blocks(stacked.numpy(), kind)
        writer.add_tensor(name, blocks, raw_dtype=kind)
        numbers = torch.from_numpy(np.array(gguf.dequantize(blocks, kind))).reshape(stacked.shape)
        back = numbers.unbind() if EXPERT.search(members[0]) else [numbers]
        assert kind == gguf.GGMLQuantizationType.F32 or members[0] in stands_for, "a stack stays as it is"
        for member, one in zip(members, back, strict=True):
            if member not in stands_for:
                continue
            stands_for[member] = change_back(one, name, architecture, config, weights[member].shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(
        {name: tensor.contiguous() for name, tensor in stands_for.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )


def in_type(kind: str) -> Types:
    """Let all matrices that can have a type have it."""

    def type_of(name: str, shape: tuple[int, ...]) -> str:
        size, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        is_kept = len(shape) == 1 or shape[-1] % size != 0 or "ffn_gate_inp" in name
        return "F32" if is_kept else kind

    return type_of


def one_by_one(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights with each expert's matrices instead of stacks; files have gates and ups apart."""
    found = {name: tensor for name, tensor in weights.items() if not name.endswith(STACKS)}
    for name in weights.keys() - found.keys():
        module, _, stack = name.rpartition(".")
        projections = ["gate_proj", "up_proj"] if stack == "gate_up_proj" else [stack]
        for number, expert in enumerate(weights[name]):
            for projection, matrix in zip(projections, expert.chunk(len(projections)), strict=True):
                found[f"{module}.{number}.{projection}.weight"] = matrix
    return found


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


def metadata_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the converter says of a config."""
    own = {key: config[name] for name, key in SETTINGS.items() if config.get(name) is not None}
    heads = config["num_attention_heads"]
    rope = config["rope_parameters"]
    both = rope.get("full_attention", rope)
    size = config.get("head_dim") or config["hidden_size"] // heads
    own["rope.freq_base"] = float(both["rope_theta"])
    own["rope.dimension_count"] = int(size * both.get("partial_rotary_factor", 1))
    if "sliding_attention" in rope:
        own["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
    if "linear_num_value_heads" in config:
        heads = config["linear_num_value_heads"]
        own |= {
            "ssm.conv_kernel": config["linear_conv_kernel_dim"],
            "ssm.state_size": config["linear_key_head_dim"],
            "ssm.group_count": config["linear_num_key_heads"],
            "ssm.time_step_rank": heads,
            "ssm.inner_size": config["linear_value_head_dim"] * heads,
            "full_attention_interval": config["layer_types"].index("full_attention") + 1,
        }
        if "mrope_section" in both:
            own["rope.dimension_sections"] = [*both["mrope_section"], 0]
    if config["model_type"] == "lfm2":
        counts = [config["num_key_value_heads"] * (kind == "full_attention") for kind in config["layer_types"]]
        own |= {"attention.head_count_kv": counts, "shortconv.l_cache": config["conv_L_cache"]}
    if both["rope_type"] in ("linear", "yarn"):
        own |= {"rope.scaling.type": both["rope_type"], "rope.scaling.factor": float(both["factor"])}
    if both["rope_type"] in ("yarn", "longrope"):
        length = config.get("original_max_position_embeddings") or both["original_max_position_embeddings"]
        own["rope.scaling.original_context_length"] = length
    return own


def rotations_of(config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors by which a model's rotations are slower."""
    rope = config["rope_parameters"]
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{kind}.weight": torch.tensor(rope[f"{kind}_factor"]) for kind in ("long", "short")}
    if rope.get("rope_type") != "llama3":
        return {}
    size, length = config["head_dim"], rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for pair in range(0, size, 2):
        wave = 2 * math.pi * rope["rope_theta"] ** (pair / size)
        smooth = min(max((length / wave - low) / (high - low), 0), 1)
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return {"rope_freqs.weight": torch.tensor(factors)}


def stored_names(architecture: str, layers: int, weights: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return the tensors' names in the file, and those of a checkpoint, of which a stack has several."""
    (number,) = (number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(number, layers)
    names: dict[str, list[str]] = {}
    for name in sorted(weights, key=lambda name: int(found[1]) if (found := EXPERT.search(name)) else 0):
        spelled = EXPERT.sub(".experts.", name).replace(".dt_bias", ".dt_proj.bias")
        stored = table.get_name(spelled, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        names.setdefault(stored, []).append(name)
    return names


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
    if heads := heads_of(name, architecture, config):
        return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    if adds_one(name, architecture):
        return tensor + 1
    return tensor.squeeze(1) if tensor.dim() == 3 else tensor.squeeze(0) if tensor.dim() == 2 else tensor


def change_back(tensor: Tensor, name: str, architecture: str, config: Mapping[str, Any], shape: torch.Size) -> Tensor:
    """Return the checkpoint's tensor of what the file has."""
    if architecture in TILED and (order := tiles_of(name, config)) is not None:
        tensor = tensor.neg().log() if name.endswith("ssm_a") else tensor
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
