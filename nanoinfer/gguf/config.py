"""The config of a GGUF file: what its metadata and the shapes of its tensors say, as a config.json would."""

from __future__ import annotations

from typing import Any

from nanoinfer.gguf.architectures.families import family_of
from nanoinfer.gguf.architectures.rotations import LENGTH, head_size, usual_head_size
from nanoinfer.gguf.header import Header, layers_of

COMMON = {  # the config's names of what most metadata say
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
}
BEGIN, ENDS = "bos_token_id", ("eos_token_id", "eot_token_id", "eom_token_id")
COUNTS = "expert_count", "expert_used_count"  # without which experts would be as many as a class has usually
HALVES = {"F16": "float16", "BF16": "bfloat16"}
EXPERTS = {  # the metadata that say an expert's size, and the tensors that have it
    "moe_intermediate_size": ("expert_feed_forward_length", ("ffn_gate_exps.weight", "ffn_up_exps.weight")),
    "shared_expert_intermediate_size": ("expert_shared_feed_forward_length", ("ffn_gate_shexp.weight",)),
}


def config_of(header: Header) -> dict[str, Any]:
    """Return the settings of a config.json. Raises ValueError, naming what is missing or unknown."""
    family = family_of(header)
    sizes = {ours: header.needed(key) for key, ours in COMMON.items()} | {"num_hidden_layers": layers_of(header)}
    if header.get("feed_forward_length") is not None:  # of experts alone, files do not say
        sizes["intermediate_size"] = header.largest("feed_forward_length", 0)
    has_experts = header.has("ffn_down_exps.weight")
    further = {
        ours: value
        for key, ours in family.keys.items()
        if (value := header.needed(key) if has_experts and key in COUNTS else header.get(key)) is not None
    }
    rope = family.rope(header)
    # Classes with longrope read the length outside, too.
    outside = {LENGTH: rope[LENGTH]} if rope.get("rope_type") == "longrope" else {}
    own = {
        "model_type": family.model_type,
        "architectures": [family.name],
        "num_key_value_heads": header.largest("attention.head_count_kv", sizes["num_attention_heads"]),
        "vocab_size": header.tensor("token_embd.weight").shape[0],
        "tie_word_embeddings": "output.weight" not in header.entries,
        "dtype": _dtype_of(header),
        family.epsilon: _epsilon(header),
        **_special_tokens(header),
        **_biases(header),
        **_experts(header),
        **_head(header),
        "rope_parameters": rope,
        **outside,
    }
    for read in family.reads:
        own |= read(header)
    return {**sizes, **family.settings, **further, **own}


def _epsilon(header: Header) -> float:
    """Return that of norms: most files say that of RMSNorm, some that of LayerNorm."""
    rms, usual = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
    return float(header.needed(usual if header.get(rms) is None and header.get(usual) is not None else rms))


def _special_tokens(header: Header) -> dict[str, Any]:
    """Return the token that begins texts, and those that end them or a turn."""
    ends = (header.metadata.get(f"tokenizer.ggml.{name}") for name in ENDS)
    found = list(dict.fromkeys(end for end in ends if end is not None))
    end = found if len(found) > 1 else found[0] if found else None
    return {BEGIN: header.metadata.get(f"tokenizer.ggml.{BEGIN}"), ENDS[0]: end}


def _dtype_of(header: Header) -> str:
    """Return the dtype that holds most of what the file holds: of few bits, that of most checkpoints."""
    types = {entry.type for entry in header.entries.values() if len(entry.shape) > 1}
    if types <= {"F32"}:
        return "float32"
    return HALVES["F16" if types <= {"F16", "F32"} else "BF16"]


def _biases(header: Header) -> dict[str, bool]:
    """Return which biases there are, for classes that may have them or not."""
    queries, outputs, ups = (header.has(f"{name}.bias") for name in ("attn_q", "attn_output", "ffn_up"))
    return {
        "attention_bias": queries,
        "qkv_bias": queries,
        "use_bias": outputs,
        "attention_out_bias": outputs,
        "mlp_bias": ups,
    }


def _experts(header: Header) -> dict[str, int]:
    """Return the sizes of experts, which older files do not say, by their tensors."""
    found = {}
    for setting, (key, names) in EXPERTS.items():
        entries = (header.first(name) for name in names)
        sizes = (entry.shape[-2] for entry in entries if entry is not None)
        found[setting] = header.get(key, next(sizes, None))
    return {setting: size for setting, size in found.items() if size is not None}


def _head(header: Header) -> dict[str, Any]:
    """Return the size of a head, if it is not the usual one."""
    size = head_size(header)
    return {} if size == usual_head_size(header) and header.get("attention.key_length") is None else {"head_dim": size}
