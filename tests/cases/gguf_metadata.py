"""What GGUF files say of a config, as llama.cpp's converter does."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Config = Mapping[str, Any]
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
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "moe_num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "top_k_experts": "expert_used_count",
    "moe_k": "expert_used_count",
    "moe_topk": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "moe_num_shared_experts": "expert_shared_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "first_k_dense_replace": "leading_dense_block_count",
    "num_dense_layers": "leading_dense_block_count",
    "moe_layer_start_index": "leading_dense_block_count",
    "moe_layer_interval": "interleave_moe_layer_step",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "moe_latent_size": "moe_latent_size",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
}
WITH_PATTERNS = "olmo3", "exaone4", "gemma4_text"


def metadata_of(config: Config) -> dict[str, Any]:
    """Return what the converter says of a config."""
    own = {key: config[name] for name, key in SETTINGS.items() if config.get(name) is not None}
    own |= _rotations(config)
    if config["model_type"] in WITH_PATTERNS and config.get("sliding_window"):
        own["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config["layer_types"]]
    of_family = OF_FAMILIES.get(config["model_type"])
    return own if of_family is None else own | of_family(config)


def _rotations(config: Config) -> dict[str, Any]:
    rope = config.get("rope_parameters")
    if rope is None:
        return {}
    own: dict[str, Any] = {}
    both = rope.get("full_attention", rope)
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    own["rope.freq_base"] = float(both["rope_theta"])
    own["rope.dimension_count"] = int(size * both.get("partial_rotary_factor", 1))
    if "sliding_attention" in rope:
        own["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
    if "mrope_section" in both:
        own["rope.dimension_sections"] = [*both["mrope_section"], 0]
    if both["rope_type"] in ("linear", "yarn"):
        own |= {"rope.scaling.type": both["rope_type"], "rope.scaling.factor": float(both["factor"])}
    if both["rope_type"] in ("yarn", "longrope"):
        length = config.get("original_max_position_embeddings") or both["original_max_position_embeddings"]
        own["rope.scaling.original_context_length"] = length
    return own


def _of_delta(config: Config) -> dict[str, Any]:
    heads = config["linear_num_value_heads"]
    return {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": heads,
        "ssm.inner_size": config["linear_value_head_dim"] * heads,
        "full_attention_interval": config["layer_types"].index("full_attention") + 1,
    }


def _of_convolutions(config: Config) -> dict[str, Any]:
    return {"attention.head_count_kv": _keys(config), "shortconv.l_cache": config["conv_L_cache"]}


def _keys(config: Config) -> list[int]:
    """Return how many heads of keys each layer has."""
    kinds = config.get("layer_types") or config["layers_block_type"]
    return [config["num_key_value_heads"] * (kind in ("attention", "full_attention")) for kind in kinds]


def _of_granite(config: Config) -> dict[str, Any]:
    heads = config["mamba_n_heads"]
    return {
        "attention.head_count_kv": _keys(config),
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.group_count": config["mamba_n_groups"],
        "ssm.time_step_rank": heads,
        "ssm.inner_size": config["mamba_d_head"] * heads,
        "rope.scaling.finetuned": config.get("position_embedding_type") == "rope",
    }


def _of_nemotron(config: Config) -> dict[str, Any]:
    kinds, heads = config["layers_block_type"], config["mamba_num_heads"]
    mlp = "moe" if "moe" in kinds else "mlp"
    size = config["moe_intermediate_size" if mlp == "moe" else "intermediate_size"]
    return {
        "block_count": len(kinds),
        "attention.head_count_kv": _keys(config),
        "feed_forward_length": [size * (kind == mlp) for kind in kinds],
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.state_size": config["ssm_state_size"],
        "ssm.group_count": config["n_groups"],
        "ssm.time_step_rank": heads,
        "ssm.inner_size": config["mamba_head_dim"] * heads,
        **({} if mlp == "moe" else {"expert_count": 0}),
    }


def _of_latents(config: Config) -> dict[str, Any]:
    rotated, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
    own = {} if config["q_lora_rank"] is None else {"attention.q_lora_rank": config["q_lora_rank"]}
    if config.get("rope_parameters", {}).get("mscale_all_dim") is not None:
        own["rope.scaling.yarn_log_multiplier"] = 0.1 * config["rope_parameters"]["mscale_all_dim"]
    return own | {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rotated,
    }


def _of_gemma4(config: Config) -> dict[str, Any]:
    layers, kinds = config["num_hidden_layers"], config["layer_types"]
    (of_full,) = {json_key(own) for kind, own in _per_layer(config) if kind == "full_attention"}
    own: dict[str, Any] = dict(of_full)
    full = own.get("head_dim", config["head_dim"])
    counts = {"full_attention": own.get("num_key_value_heads", config["num_key_value_heads"])}
    shared = config["num_kv_shared_layers"]
    size = config["intermediate_size"]
    wide = [size * (1 + (config["use_double_wide_mlp"] and layer >= layers - shared)) for layer in range(layers)]
    return {
        "attention.key_length": full,
        "attention.value_length": full,
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "attention.shared_kv_layers": shared,
        "attention.head_count_kv": [counts.get(kind, config["num_key_value_heads"]) for kind in kinds],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"] or 0,
        "feed_forward_length": wide if config["use_double_wide_mlp"] else size,
        "rope.dimension_count": full,
        "rope.dimension_count_swa": config["head_dim"],
    }


def _per_layer(config: Config) -> list[tuple[str, dict[str, Any]]]:
    """Return each layer's kind, and the settings that it has instead of the config's."""
    own = config.get("per_layer_config") or {}
    return [(kind, own.get(str(layer), own.get(kind, {}))) for layer, kind in enumerate(config["layer_types"])]


def json_key(settings: Config) -> tuple[tuple[str, Any], ...]:
    """Return settings as what a set can hold."""
    return tuple(sorted((name, value) for name, value in settings.items() if isinstance(value, (int, float))))


def _of_gpt_oss(config: Config) -> dict[str, Any]:
    return {"expert_feed_forward_length": config["intermediate_size"]}


def _of_ministral3(config: Config) -> dict[str, Any]:
    rope = config["rope_parameters"]
    return {
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
        **({"rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"]} if "mscale_all_dim" in rope else {}),
    }


OF_FAMILIES: dict[str, Callable[[Config], dict[str, Any]]] = {
    "deepseek_v2": _of_latents,
    "deepseek_v3": _of_latents,
    "gemma4_text": _of_gemma4,
    "glm4_moe_lite": _of_latents,
    "gpt_oss": _of_gpt_oss,
    "granitemoehybrid": _of_granite,
    "lfm2": _of_convolutions,
    "lfm2_moe": _of_convolutions,
    "ministral3": _of_ministral3,
    "nemotron_h": _of_nemotron,
    "qwen3_5_text": _of_delta,
    "qwen3_5_moe_text": _of_delta,
    "qwen3_next": _of_delta,
}


def rotations_of(config: Config) -> dict[str, Tensor]:
    """Return the tensors by which a model's rotations are slower."""
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{kind}.weight": torch.tensor(rope[f"{kind}_factor"]) for kind in ("long", "short")}
    if rope.get("rope_type") == "proportional":
        half = _of_gemma4(config)["attention.key_length"] // 2
        turning = int(half * rope["partial_rotary_factor"])
        return {"rope_freqs.weight": torch.tensor([1.0] * turning + [1e30] * (half - turning))}
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
