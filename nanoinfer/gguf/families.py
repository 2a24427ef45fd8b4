"""Families: what sets the architectures apart that GGUF files name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from nanoinfer.gguf.header import Header

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
    """

    model_type: str
    name: str
    keys: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)
    in_pairs: bool = False
    norms_more: float = 0.0
    epsilon: str = "rms_norm_eps"

    def heads_of(self, header: Header, name: str) -> int:
        """Return of how many heads a tensor has the rows in pairs; 0: it has not."""
        if not self.in_pairs:
            return 0
        queries = int(header.needed("attention.head_count"))
        if QUERIES.search(name):
            return queries
        return int(header.get("attention.head_count_kv", queries)) if KEYS.search(name) else 0

    def more_of(self, name: str) -> float:
        """Return how much more the numbers of a tensor are than the checkpoint's."""
        return self.norms_more if name.endswith("norm.weight") else 0.0


WINDOW = {"attention.sliding_window": "sliding_window"}
EXPERTS = {"expert_used_count": "num_experts_per_tok"}
GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
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
