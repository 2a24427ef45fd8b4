"""Families: what sets the architectures apart that GGUF files name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from nanoinfer.gguf.header import Header
from nanoinfer.gguf.tensor import Change, Order

TOWERS = "clip", "mmproj"
QUERIES, KEYS = re.compile(r"\.attn_q\.(weight|bias)$"), re.compile(r"\.attn_k\.(weight|bias)$")


@dataclass(frozen=True)
class Family:
    """An architecture.

    model_type, name: transformers' names of the config and of the class
    keys: settings of the config by those of the metadata, beside those that all have
    settings: what the config needs and no metadata say
    in_pairs: rows of queries and keys lie as rotations take them, pair by pair
    norms_more: weights of norms are stored so much more than the checkpoint's
    epsilon: the config's name of that of norms
    has_tiles: value heads of the gated delta rule lie as TILED says
    """

    model_type: str
    name: str
    keys: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)
    in_pairs: bool = False
    norms_more: float = 0.0
    epsilon: str = "rms_norm_eps"
    has_tiles: bool = False

    def change_of(self, header: Header, name: str) -> Change:
        """Return what sets a tensor of the file apart from the checkpoint's."""
        if self.has_tiles and (tiled := TILED.get(name.split(".", 2)[-1])) is not None:
            return tiled(header)
        more = self.norms_more if name.endswith("norm.weight") and "ssm_norm" not in name else 0.0
        return Change(self._in_pairs(header, name), more=more)

    def _in_pairs(self, header: Header, name: str) -> Order | None:
        """Return the order of rows that lie pair by pair."""
        queries = int(header.needed("attention.head_count")) if self.in_pairs else 0
        if queries and QUERIES.search(name):
            return Order(queries, -1, 2)
        is_key = queries and KEYS.search(name)
        return Order(int(header.get("attention.head_count_kv", queries)), -1, 2) if is_key else None


def _tiles(header: Header, of_values: bool = True, behind_keys: bool = False) -> Order:
    """Return the order of value heads, of which those of one key lie apart in the file.

    of_values: each has as many rows as values, and not one
    behind_keys: behind the rows of queries and keys
    """
    keys, heads = header.needed("ssm.group_count"), header.needed("ssm.time_step_rank")
    size = header.needed("ssm.inner_size") // heads if of_values else 1
    return Order(1, heads // keys, keys, size, 2 * keys * header.needed("ssm.state_size") if behind_keys else 0)


def _of_keys_and_values(header: Header) -> Change:
    return Change(_tiles(header, behind_keys=True))


def _of_heads(header: Header) -> Change:
    return Change(_tiles(header, of_values=False))


TILED: dict[str, Callable[[Header], Change]] = {
    "attn_qkv.weight": _of_keys_and_values,
    "ssm_conv1d.weight": _of_keys_and_values,
    "attn_gate.weight": lambda header: Change(_tiles(header)),
    "ssm_out.weight": lambda header: Change(columns=_tiles(header)),
    "ssm_alpha.weight": _of_heads,
    "ssm_beta.weight": _of_heads,
    "ssm_dt.bias": _of_heads,
    "ssm_a": lambda header: replace(_of_heads(header), is_exponential=True),
}  # of the gated delta rule, by the names in a layer
WINDOW = {"attention.sliding_window": "sliding_window"}
EXPERTS = {"expert_used_count": "num_experts_per_tok"}
GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
DELTA = {
    "full_attention_interval": "full_attention_interval",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
SOFT_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
FAMILIES = {
    "gemma": Family("gemma", "GemmaForCausalLM", norms_more=1.0),
    "gemma2": Family("gemma2", "Gemma2ForCausalLM", {**WINDOW, **SOFT_CAPS}, norms_more=1.0),
    "gemma3": Family("gemma3_text", "Gemma3ForCausalLM", {**WINDOW, **SOFT_CAPS}, norms_more=1.0),
    "glm4": Family("glm4", "Glm4ForCausalLM"),
    "granite": Family("granite", "GraniteForCausalLM", GRANITE, in_pairs=True),
    "lfm2": Family("lfm2", "Lfm2ForCausalLM", epsilon="norm_eps"),
    "llama": Family("llama", "LlamaForCausalLM", in_pairs=True),
    "nemotron": Family("nemotron", "NemotronForCausalLM", norms_more=1.0, epsilon="norm_eps"),
    "olmo2": Family("olmo2", "Olmo2ForCausalLM"),
    "phi3": Family("phi3", "Phi3ForCausalLM", WINDOW),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM"),
    "qwen2moe": Family("qwen2_moe", "Qwen2MoeForCausalLM", {**EXPERTS, "expert_count": "num_experts"}),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {**EXPERTS, "expert_count": "num_experts"},
        {"norm_topk_prob": True},
    ),
    "qwen35": Family("qwen3_5_text", "Qwen3_5ForCausalLM", DELTA, norms_more=1.0, has_tiles=True),
    "qwen35moe": Family(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        {**DELTA, **EXPERTS, "expert_count": "num_experts"},
        norms_more=1.0,
        has_tiles=True,
    ),
    "seed_oss": Family("seed_oss", "SeedOssForCausalLM"),
    "starcoder2": Family("starcoder2", "Starcoder2ForCausalLM", WINDOW, epsilon="norm_epsilon"),
}
MIXTRAL = Family(
    "mixtral", "MixtralForCausalLM", {**EXPERTS, "expert_count": "num_local_experts"}, in_pairs=True
)  # whose files are called llama's


def family_of(header: Header) -> Family:
    """Return a file's family; raises ValueError, naming the architecture, if none is known."""
    name = header.architecture
    if name in TOWERS or header.metadata.get("general.type") == "mmproj":
        raise ValueError(f"{header.path}: is a tower (mmproj), which nobody reads: give the language model's file")
    if name not in FAMILIES:
        raise ValueError(
            f"{header.path}: general.architecture={name!r} is not supported in GGUF: must be one of"
            f" {', '.join(FAMILIES)}; others run from the safetensors files that they were made from"
        )
    return MIXTRAL if name == "llama" and header.get("expert_count") else FAMILIES[name]
