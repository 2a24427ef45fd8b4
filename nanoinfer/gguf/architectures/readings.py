"""Settings of a config that single families read in a GGUF file's header."""

from __future__ import annotations

from typing import Any

from nanoinfer.gguf.architectures.rotations import head_size, usual_head_size
from nanoinfer.gguf.header import Header, layers_of

LARGEST_GEMMAS = {"gemma2": 46, "gemma3": 62}  # layers
SHARED_SIZE = "expert_shared_feed_forward_length"


def windows(header: Header) -> dict[str, Any]:
    """Return the window, and which layers have it, if the file says; without a window, none has."""
    window, pattern = header.get("attention.sliding_window"), header.get("attention.sliding_window_pattern")
    if not window:
        return {"sliding_window": None, "layer_types": ["full_attention"] * layers_of(header)}
    if not isinstance(pattern, list):
        return {"sliding_window": window}
    kinds = ["sliding_attention" if has_window else "full_attention" for has_window in pattern]
    return {"sliding_window": window, "layer_types": kinds[: layers_of(header)]}


def window(header: Header) -> dict[str, Any]:
    """Return the window of all layers; files without one may say 0."""
    return {"sliding_window": header.get("attention.sliding_window") or None}


def convolutions(header: Header) -> dict[str, Any]:
    """Return what LFM2's files say: a layer without keys is a short convolution."""
    return {
        "layer_types": _kinds(header, "conv"),
        "conv_L_cache": header.needed("shortconv.l_cache"),
        "conv_bias": header.has("shortconv.in_proj.bias"),
        "block_auto_adjust_ff_dim": False,  # feed_forward_length is what the adjustment made
        "use_expert_bias": header.has("exp_probs_b.bias"),
    }


def values(header: Header) -> dict[str, Any]:
    """Return the size of the gated delta rule's values, which files say of all heads together."""
    return {"linear_value_head_dim": header.needed("ssm.inner_size") // header.needed("ssm.time_step_rank")}


def gemma_scale(header: Header) -> dict[str, int]:
    """Return what divides Gemma's products, which the largest models, of 27B, have another one of."""
    is_largest = LARGEST_GEMMAS[header.architecture] == layers_of(header)
    return {"query_pre_attn_scalar": usual_head_size(header) if is_largest else head_size(header)}


def norms_of_heads(header: Header) -> dict[str, bool]:
    """Return whether queries and keys are normalised, which some classes may do or not."""
    return {"use_qk_norm": header.has("attn_q_norm.weight")}


def dense_size(header: Header) -> dict[str, int]:
    """Return the MLPs' size, of which Granite 4's files say another one."""
    entry = header.first("ffn_up.weight")
    return {} if entry is None else {"intermediate_size": entry.shape[0]}


def granite_mamba(header: Header) -> dict[str, Any]:
    """Return what Granite 4's files say: a layer without keys has Mamba2."""
    header.needed("attention.scale")  # which Bamba's files, of the same architecture, lack
    entry = header.first("ffn_up.weight")
    size = header.get(SHARED_SIZE) if entry is None else entry.shape[0]
    inner = header.needed("ssm.inner_size")
    return {
        "layer_types": _kinds(header, "linear_attention"),
        "mamba_n_heads": header.needed("ssm.time_step_rank"),
        "mamba_d_head": inner // header.needed("ssm.time_step_rank"),
        "mamba_expand": inner // header.needed("embedding_length"),
        "mamba_conv_bias": header.has("ssm_conv1d.bias"),
        "mamba_proj_bias": header.has("ssm_in.bias"),
        "num_local_experts": header.get("expert_count", 0),
        "shared_intermediate_size": size,
        "position_embedding_type": "rope" if header.get("rope.scaling.finetuned", True) else "nope",
    }


def nemotron_mamba(header: Header) -> dict[str, Any]:
    """Return what Nemotron-H's files say: each layer has attention, Mamba2, or an MLP."""
    keys, sizes = header.needed("attention.head_count_kv"), header.needed("feed_forward_length")
    mlp = "moe" if header.get("expert_count") else "mlp"
    kinds = [
        "full_attention" if key else mlp if size else "linear_attention" for key, size in zip(keys, sizes, strict=True)
    ]
    heads = header.needed("ssm.time_step_rank")
    return {
        "layer_types": kinds[: layers_of(header)],
        "mamba_num_heads": heads,
        "mamba_head_dim": header.needed("ssm.inner_size") // heads,
        "use_conv_bias": header.has("ssm_conv1d.bias"),
        "use_bias": header.has("ssm_in.bias"),
        "mlp_bias": header.has("ffn_up.bias") or header.has("ffn_up_shexp.bias"),
    }


def latents(header: Header) -> dict[str, Any]:
    """Return the sizes of DeepSeek's attention; older files have keys and values of each head in one tensor."""
    rotated = header.needed("rope.dimension_count")
    keys = header.get("attention.key_length_mla", header.needed("attention.key_length"))
    return {
        "num_key_value_heads": header.needed("attention.head_count"),
        "q_lora_rank": header.get("attention.q_lora_rank"),
        "qk_nope_head_dim": keys - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": header.get("attention.value_length_mla", header.needed("attention.value_length")),
        "head_dim": rotated,
        "topk_method": "group_limited_greedy" if header.get("expert_group_count", 1) > 1 else "greedy",
    }


def gemma4(header: Header) -> dict[str, Any]:
    """Return what Gemma 4's files say: layers without a window have heads of another size, and may share keys."""
    found = windows(header)
    is_full = [kind == "full_attention" for kind in found["layer_types"]]
    heads, sizes = header.needed("attention.head_count_kv"), header.needed("feed_forward_length")
    of_kind = dict(zip(is_full, heads, strict=False)) if isinstance(heads, list) else {}
    counts = sizes if isinstance(sizes, list) else [sizes]
    full = f"blk.{is_full.index(True)}."
    experts = header.get("expert_count")
    return {
        **found,
        "head_dim": header.needed("attention.key_length_swa"),
        "global_head_dim": header.needed("attention.key_length"),
        "num_key_value_heads": of_kind.get(False, header.largest("attention.head_count_kv", 1)),
        "num_global_key_value_heads": of_kind.get(True),
        "attention_k_eq_v": f"{full}attn_v.weight" not in header.entries,
        "intermediate_size": min(counts),
        "use_double_wide_mlp": max(counts) > min(counts),
        "num_kv_shared_layers": header.get("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": header.get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": header.tensor("token_embd.weight").shape[0],
        "enable_moe_block": bool(experts),
    }


def _kinds(header: Header, other: str) -> list[str]:
    """Return what layers have: attention, or if they have no keys, what is named."""
    counts = header.needed("attention.head_count_kv")
    return ["full_attention" if count else other for count in counts][: layers_of(header)]
