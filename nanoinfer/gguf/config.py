"""The config of a GGUF file: what its metadata and the shapes of its tensors say, as a config.json would."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from nanoinfer.gguf.families import family_of
from nanoinfer.gguf.header import Entry, Header, layers_of
from nanoinfer.gguf.tensor import GgufTensor

COMMON = {  # the config's names of what most metadata say
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
}
IDS = ("eos_token_id", "bos_token_id")
HALVES = {"F16": "float16", "BF16": "bfloat16"}
LOCAL_THETA = 10_000.0  # of Gemma 3's layers with windows, which few files say
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LARGEST_GEMMAS = {"gemma2": 46, "gemma3": 62}  # layers of 27B, which divides queries otherwise than the others


def config_of(header: Header) -> dict[str, Any]:
    """Return the settings of a config.json. Raises ValueError, naming what is missing or unknown."""
    family = family_of(header)
    sizes = {ours: header.needed(key) for key, ours in COMMON.items()} | {"num_hidden_layers": layers_of(header)}
    if (dense := header.get("feed_forward_length")) is not None:  # of experts alone, files do not say
        sizes["intermediate_size"] = dense
    further = {ours: value for key, ours in family.keys.items() if (value := header.get(key))}  # a window of 0 is none
    own = {
        "model_type": family.model_type,
        "architectures": [family.name],
        "num_key_value_heads": header.get("attention.head_count_kv", sizes["num_attention_heads"]),
        "vocab_size": _tensor(header, "token_embd.weight").shape[0],
        "tie_word_embeddings": "output.weight" not in header.entries,
        "dtype": _dtype_of(header),
        family.epsilon: header.get("attention.layer_norm_rms_epsilon", header.get("attention.layer_norm_epsilon")),
        **{name: header.metadata.get(f"tokenizer.ggml.{name}") for name in IDS},
        **_biases(header, family.model_type),
        **_experts(header),
        **_head(header, sizes),
        **_convolutions(header),
        **_values(header),
    }
    rope = _rope(header, sizes)
    length = "original_max_position_embeddings"  # which classes with longrope read outside, too
    outside = {length: rope[length]} if rope.get("rope_type") == "longrope" else {}
    return {**sizes, **family.settings, **further, **own, **outside, "rope_parameters": rope}


def _tensor(header: Header, name: str) -> Entry:
    if name not in header.entries:
        raise ValueError(f"{header.path}: has no tensor {name}, so it is no language model")
    return header.entries[name]


def _dtype_of(header: Header) -> str:
    """Return the dtype that holds most of what the file holds: of few bits, that of most checkpoints."""
    types = {entry.type for entry in header.entries.values() if len(entry.shape) > 1}
    if types <= {"F32"}:
        return "float32"
    return HALVES["F16" if types <= {"F16", "F32"} else "BF16"]


def _biases(header: Header, model_type: str) -> dict[str, bool]:
    """Return which biases there are, for classes that may have them or not."""
    queries, outputs = (f"blk.0.{name}.bias" in header.entries for name in ("attn_q", "attn_output"))
    if model_type == "starcoder2":
        return {"use_bias": queries}
    in_mlp = "blk.0.ffn_up.bias" in header.entries
    return {"attention_bias": queries, "qkv_bias": queries, "attention_out_bias": outputs, "mlp_bias": in_mlp}


def _experts(header: Header) -> dict[str, int]:
    """Return the sizes of experts, which older files do not say, by their tensors."""
    sizes = {"moe_intermediate_size": "ffn_gate_exps", "shared_expert_intermediate_size": "ffn_gate_shexp"}
    entries = {ours: header.entries.get(f"blk.0.{name}.weight") for ours, name in sizes.items()}
    return {ours: entry.shape[-2] for ours, entry in entries.items() if entry is not None}


def _convolutions(header: Header) -> dict[str, Any]:
    """Return what LFM2's files say: a layer without keys is a short convolution."""
    if header.architecture != "lfm2":
        return {}
    counts = header.needed("attention.head_count_kv")
    return {
        "num_key_value_heads": max(counts),
        "layer_types": ["full_attention" if count else "conv" for count in counts],
        "conv_L_cache": header.needed("shortconv.l_cache"),
        "conv_bias": any(name.endswith("shortconv.in_proj.bias") for name in header.entries),
        "block_auto_adjust_ff_dim": False,  # feed_forward_length is what the adjustment made
    }


def _values(header: Header) -> dict[str, Any]:
    """Return the size of the gated delta rule's values, which files say of all heads together."""
    inner = header.get("ssm.inner_size")
    return {} if inner is None else {"linear_value_head_dim": inner // header.needed("ssm.time_step_rank")}


def _head(header: Header, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the size of a head, if it is not the usual one, and what divides Gemma's products."""
    usual = sizes["hidden_size"] // sizes["num_attention_heads"]
    size = _head_size(header, sizes)
    own = {} if size == usual and header.get("attention.key_length") is None else {"head_dim": size}
    if header.architecture not in LARGEST_GEMMAS:
        return own
    is_largest = LARGEST_GEMMAS[header.architecture] == sizes["num_hidden_layers"]
    return {**own, "query_pre_attn_scalar": usual if is_largest else size}


def _head_size(header: Header, sizes: Mapping[str, Any]) -> int:
    by_rotation = header.get("rope.dimension_count") if header.architecture == "llama" else None
    usual = sizes["hidden_size"] // sizes["num_attention_heads"]
    return int(header.get("attention.key_length") or by_rotation or usual)


def _rope(header: Header, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return rope_parameters."""
    size, theta = _head_size(header, sizes), float(header.get("rope.freq_base", LOCAL_THETA))
    rotated = header.get("rope.dimension_count", size)
    share = {} if rotated == size else {"partial_rotary_factor": rotated / size}
    own = {**_scaling(header, rotated, theta), "rope_theta": theta, **share}
    if (sections := header.get("rope.dimension_sections")) is not None:  # filled up to four
        own |= {"mrope_section": [section for section in sections if section], "mrope_interleaved": True}
    if header.architecture != "gemma3":
        return own
    local = {"rope_type": "default", "rope_theta": float(header.get("rope.freq_base_swa", LOCAL_THETA))}
    return {"full_attention": own, "sliding_attention": local}


def _scaling(header: Header, rotated: int, theta: float) -> dict[str, Any]:
    """Return what stretches the rotation; raises ValueError, naming it, for what is not known."""
    kind = header.get("rope.scaling.type", "none")
    length = header.get("rope.scaling.original_context_length")
    if "rope_factors_long.weight" in header.entries:
        return _longrope(header, length)
    if "rope_freqs.weight" in header.entries:
        return _llama3(header, rotated, theta)
    if kind == "none":
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": header.needed("rope.scaling.factor")}
    if kind == "yarn":
        factor = header.needed("rope.scaling.factor")
        betas = {name: header.get(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        own = {name: value for name, value in betas.items() if value is not None}
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length, **own}
    raise ValueError(
        f"{header.path}: rope.scaling.type={kind!r}: must be none, linear, yarn, or have factors in tensors"
    )


def _longrope(header: Header, length: int) -> dict[str, Any]:
    """Return the settings of Phi-3, whose tensors say by how much frequencies are smaller."""
    factors = {f"{kind}_factor": _numbers(header, f"rope_factors_{kind}.weight").tolist() for kind in ("long", "short")}
    attention = header.get("rope.scaling.attn_factor")
    own = {} if attention is None else {"attention_factor": attention}
    return {"rope_type": "longrope", **factors, **own, "original_max_position_embeddings": length}


def _llama3(header: Header, rotated: int, theta: float) -> dict[str, Any]:
    """Return the settings by which Llama 3's frequencies became as much smaller as a tensor says."""
    smaller = _numbers(header, "rope_freqs.weight")
    factor = float(smaller.max())
    turns = LLAMA3["original_max_position_embeddings"] / (
        2 * math.pi * theta ** (torch.arange(0, rotated, 2) / rotated)
    )
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    share = ((turns - low) / (high - low)).clamp(0, 1)
    if smaller.shape != turns.shape or not torch.allclose(1 / ((1 - share) / factor + share), smaller, rtol=1e-3):
        raise ValueError(
            f"{header.path}: rope_freqs.weight: must be Llama 3's factors for an original length of 8192; give"
            " hf_config_path, whose config.json says how they came about"
        )
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}


def _numbers(header: Header, name: str) -> torch.Tensor:
    entry = _tensor(header, name)
    return GgufTensor(entry, entry.shape)[...].float()
