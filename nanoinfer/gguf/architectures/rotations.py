"""The rotations that a GGUF file's metadata and tensors say, as rope_parameters."""

from __future__ import annotations

import math
from typing import Any

import torch

from nanoinfer.gguf.header import Header
from nanoinfer.gguf.tensors.tensor import GgufTensor

LOCAL_THETA = 10_000.0  # of Gemma 3's layers with windows, which few files say
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LENGTH = "original_max_position_embeddings"
YARN = {
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
    "attention_factor": "rope.scaling.yarn_attn_factor",
    "llama_4_scaling_beta": "attention.temperature_scale",
}  # settings, and what the metadata call them
LOG_FACTOR = "rope.scaling.yarn_log_multiplier"
FREQUENCIES = "rope_freqs.weight"
NEVER = 1e29  # times slower than usual: such numbers of a head do not turn


def usual_head_size(header: Header) -> int:
    """Return how many numbers a head has, if nothing else is said."""
    return int(header.needed("embedding_length") // header.needed("attention.head_count"))


def head_size(header: Header) -> int:
    """Return how many numbers a head has; of latent attention, how many of them turn."""
    if header.get("attention.kv_lora_rank") is not None:
        return int(header.needed("rope.dimension_count"))
    by_rotation = header.get("rope.dimension_count") if header.architecture == "llama" else None
    return int(header.get("attention.key_length") or by_rotation or usual_head_size(header))


def rope_of(header: Header) -> dict[str, Any]:
    """Return rope_parameters of all layers; raises ValueError, naming it, for what is not known."""
    size, theta = head_size(header), float(header.get("rope.freq_base", LOCAL_THETA))
    rotated = header.get("rope.dimension_count", size)
    share = {} if rotated == size else {"partial_rotary_factor": rotated / size}
    own = {**_scaling(header, rotated, theta), "rope_theta": theta, **share}
    if (sections := header.get("rope.dimension_sections")) is not None:  # filled up to four
        own |= {"mrope_section": [section for section in sections if section], "mrope_interleaved": True}
    return own


def gpt_oss_rope(header: Header) -> dict[str, Any]:
    """Return that of gpt-oss, whose bounds of YaRN are not rounded, as no metadata say."""
    return {**rope_of(header), "truncate": False}


def gemma3_rope(header: Header) -> dict[str, Any]:
    """Return that of Gemma 3, whose layers with windows turn otherwise."""
    return _with_local_rope(header, rope_of(header), LOCAL_THETA)


def olmo3_rope(header: Header) -> dict[str, Any]:
    """Return that of OLMo 3, whose layers with windows do not stretch it."""
    rope = rope_of(header)
    return _with_local_rope(header, rope, rope["rope_theta"])


def gemma4_rope(header: Header) -> dict[str, Any]:
    """Return that of Gemma 4: a tensor says how much of a head turns in layers without windows."""
    theta, slower = float(header.needed("rope.freq_base")), numbers_of(header, FREQUENCIES)
    turning = slower < NEVER
    if not torch.equal(slower[: int(turning.sum())], torch.ones(int(turning.sum()))):
        raise ValueError(f"{header.path}: {FREQUENCIES}: must be 1 at first, and 1e30 behind, as Gemma 4's are")
    share = float(turning.float().mean())
    own = {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": share}
    return _with_local_rope(header, own, LOCAL_THETA)


def _with_local_rope(header: Header, rope: dict[str, Any], theta: float) -> dict[str, Any]:
    """Return rope_parameters where layers with windows have their own.

    rope: of the others; theta: of those with windows, if the file does not say
    """
    local = float(header.get("rope.freq_base_swa", theta))
    return {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": local}}


def numbers_of(header: Header, name: str) -> torch.Tensor:
    """Return a small tensor."""
    entry = header.tensor(name)
    return GgufTensor(entry, entry.shape)[...].float()


def _scaling(header: Header, rotated: int, theta: float) -> dict[str, Any]:
    """Return what stretches the rotation."""
    kind = header.get("rope.scaling.type", "none")
    length = header.get("rope.scaling.original_context_length")
    if "rope_factors_long.weight" in header.entries:
        return _longrope(header, length)
    if FREQUENCIES in header.entries:
        return _llama3(header, rotated, theta)
    if kind == "none":
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": header.needed("rope.scaling.factor")}
    if kind == "yarn":
        return _yarn(header)
    raise ValueError(
        f"{header.path}: rope.scaling.type={kind!r}: must be none, linear, yarn, or have factors in tensors"
    )


def _yarn(header: Header) -> dict[str, Any]:
    """Return the settings of YaRN."""
    factor, length = header.needed("rope.scaling.factor"), header.get("rope.scaling.original_context_length")
    own = {name: value for name, key in YARN.items() if (value := header.get(key)) is not None}
    if (log_factor := header.get(LOG_FACTOR)) is not None:
        scale = log_factor * 10 if header.architecture == "deepseek2" else log_factor  # which the converter divides
        own |= {"mscale": scale, "mscale_all_dim": scale}
    return {"rope_type": "yarn", "factor": factor, LENGTH: length, **own}


def _longrope(header: Header, length: int) -> dict[str, Any]:
    """Return the settings of Phi-3, whose tensors say by how much frequencies are smaller."""
    factors = {
        f"{kind}_factor": numbers_of(header, f"rope_factors_{kind}.weight").tolist() for kind in ("long", "short")
    }
    attention = header.get("rope.scaling.attn_factor")
    own = {} if attention is None else {"attention_factor": attention}
    return {"rope_type": "longrope", **factors, **own, LENGTH: length}


def _llama3(header: Header, rotated: int, theta: float) -> dict[str, Any]:
    """Return the settings by which Llama 3's frequencies became as much smaller as a tensor says."""
    smaller = numbers_of(header, FREQUENCIES)
    factor = float(smaller.max())
    turns = LLAMA3[LENGTH] / (2 * math.pi * theta ** (torch.arange(0, rotated, 2) / rotated))
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    share = ((turns - low) / (high - low)).clamp(0, 1)
    if smaller.shape != turns.shape or not torch.allclose(1 / ((1 - share) / factor + share), smaller, rtol=1e-3):
        raise ValueError(
            f"{header.path}: {FREQUENCIES}: must be Llama 3's factors for an original length of 8192; give"
            " hf_config_path, whose config.json says how they came about"
        )
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}
