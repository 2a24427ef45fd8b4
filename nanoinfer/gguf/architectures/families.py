"""Families: the architectures that GGUF files name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nanoinfer.gguf.architectures import readings, rotations
from nanoinfer.gguf.architectures.family import Family
from nanoinfer.gguf.header import Header
from nanoinfer.gguf.tensors.composed import (
    Composition,
    as_it_is,
    below,
    by_key_heads,
    keys_and_values,
    pairs,
    turned,
    turned_pairs,
)

TOWERS = "clip", "mmproj"
MODEL = "model"
WINDOW = {"attention.sliding_window": "sliding_window"}
EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
LOCAL_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
CORRECTED = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
}
ONE_GROUP = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": False}
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
OF_PAIRS = {
    "mlp.experts.gate_up_proj": (Composition(("ffn_gate_exps.weight", "ffn_up_exps.weight"), turned_pairs),),
    "mlp.experts.gate_up_proj_bias": (Composition(("ffn_gate_exps.bias", "ffn_up_exps.bias"), pairs),),
    "mlp.experts.down_proj": (Composition(("ffn_down_exps.weight",), turned),),
    "mlp.experts.down_proj_bias": (Composition(("ffn_down_exps.bias",), as_it_is),),
}  # of gpt-oss
OF_SHARED = {
    "shared_mlp.input_linear.weight": (
        Composition(("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), below),
        Composition(("ffn_gate.weight", "ffn_up.weight"), below),
    ),
    "shared_mlp.output_linear.weight": (
        Composition(("ffn_down_shexp.weight",), as_it_is),
        Composition(("ffn_down.weight",), as_it_is),
    ),
}  # of Granite
OF_ROUTERS = {
    "router.scale": (Composition(("ffn_gate_inp.scale",), as_it_is),),
    "router.per_expert_scale": (Composition(("ffn_down_exps.scale",), as_it_is),),
}  # of Gemma 4
OF_LATENTS = {
    "self_attn.kv_b_proj.weight": (Composition(("attn_k_b.weight", "attn_v_b.weight"), keys_and_values),)
}  # of DeepSeek
BY_KEY_HEADS = {
    "linear_attn.in_proj_qkvz.weight": (Composition(("attn_qkv.weight", "attn_gate.weight"), by_key_heads),)
}  # of Qwen3-Next
LLAMA = Family("llama", "LlamaForCausalLM", in_pairs=True)
MIXTRAL = Family("mixtral", "MixtralForCausalLM", LOCAL_EXPERTS, in_pairs=True)
MISTRAL = Family("mistral", "MistralForCausalLM", settings={"sliding_window": None}, in_pairs=True)
MINISTRAL3 = Family("ministral3", "Ministral3ForCausalLM", in_pairs=True)
OLMO2 = Family("olmo2", "Olmo2ForCausalLM")
OLMO3 = Family("olmo3", "Olmo3ForCausalLM", reads=(readings.windows,), rope=rotations.olmo3_rope)
LATENTS = {**CORRECTED, "attention.kv_lora_rank": "kv_lora_rank"}
DEEPSEEK2 = Family("deepseek_v2", "DeepseekV2ForCausalLM", LATENTS, ONE_GROUP, (readings.latents,), composed=OF_LATENTS)
DEEPSEEK3 = replace(DEEPSEEK2, model_type="deepseek_v3", name="DeepseekV3ForCausalLM")
QWEN2 = Family("qwen2", "Qwen2ForCausalLM")
QWEN3 = Family("qwen3", "Qwen3ForCausalLM")
QWEN3_MOE = Family("qwen3_moe", "Qwen3MoeForCausalLM", EXPERTS, {"norm_topk_prob": True})
NEMOTRON_H = Family(
    "nemotron_h",
    "NemotronHForCausalLM",
    {
        **CORRECTED,
        "ssm.state_size": "ssm_state_size",
        "ssm.group_count": "n_groups",
        "ssm.conv_kernel": "conv_kernel",
        readings.SHARED_SIZE: "moe_shared_expert_intermediate_size",
        "moe_latent_size": "moe_latent_size",
    },
    reads=(readings.nemotron_mamba,),
    in_pairs=True,
    epsilon="layer_norm_epsilon",
    experts="mixer.experts",
)
FAMILIES: dict[str, Family | Callable[[Header], Family]] = {
    "arcee": Family("arcee", "ArceeForCausalLM", in_pairs=True),
    "cohere2": Family(
        "cohere2", "Cohere2ForCausalLM", {**WINDOW, "logit_scale": "logit_scale"}, epsilon="layer_norm_eps"
    ),
    "command-r": Family(
        "cohere",
        "CohereForCausalLM",
        {"logit_scale": "logit_scale"},
        reads=(readings.norms_of_heads,),
        epsilon="layer_norm_eps",
    ),
    "deepseek2": lambda header: DEEPSEEK3 if header.has("exp_probs_b.bias") else DEEPSEEK2,
    "dots1": Family("dots1", "Dots1ForCausalLM", CORRECTED, ONE_GROUP, (readings.windows,)),
    "ernie4_5": Family("ernie4_5", "Ernie4_5ForCausalLM"),
    "ernie4_5-moe": Family(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        {
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_shared_count": "moe_num_shared_experts",
            "interleave_moe_layer_step": "moe_layer_interval",
            "leading_dense_block_count": "moe_layer_start_index",
        },
    ),
    "exaone4": Family("exaone4", "Exaone4ForCausalLM", reads=(readings.windows,)),
    "gemma": Family("gemma", "GemmaForCausalLM", norms_more=1.0),
    "gemma2": Family(
        "gemma2", "Gemma2ForCausalLM", {**WINDOW, **SOFT_CAPS}, reads=(readings.gemma_scale,), norms_more=1.0
    ),
    "gemma3": Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        {**WINDOW, **SOFT_CAPS},
        reads=(readings.gemma_scale,),
        rope=rotations.gemma3_rope,
        norms_more=1.0,
    ),
    "gemma4": Family(
        "gemma4_text",
        "Gemma4ForCausalLM",
        {**SOFT_CAPS, "expert_count": "num_experts", "expert_used_count": "top_k_experts"},
        reads=(readings.gemma4,),
        rope=rotations.gemma4_rope,
        experts="experts",
        composed=OF_ROUTERS,
    ),
    "glm4": Family("glm4", "Glm4ForCausalLM"),
    "glm4moe": Family("glm4_moe", "Glm4MoeForCausalLM", CORRECTED, ONE_GROUP, (readings.norms_of_heads,)),
    "gpt-oss": Family(
        "gpt_oss", "GptOssForCausalLM", {**WINDOW, **LOCAL_EXPERTS}, rope=rotations.gpt_oss_rope, composed=OF_PAIRS
    ),
    "granite": Family("granite", "GraniteForCausalLM", GRANITE, reads=(readings.dense_size,), in_pairs=True),
    "granitehybrid": Family(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        {
            **GRANITE,
            **LOCAL_EXPERTS,
            "ssm.group_count": "mamba_n_groups",
            "ssm.state_size": "mamba_d_state",
            "ssm.conv_kernel": "mamba_d_conv",
        },
        reads=(readings.granite_mamba,),
        in_pairs=True,
        experts="block_sparse_moe.experts",
        composed=OF_SHARED,
    ),
    "granitemoe": Family(
        "granitemoeshared",
        "GraniteMoeSharedForCausalLM",
        {**GRANITE, **LOCAL_EXPERTS, readings.SHARED_SIZE: "shared_intermediate_size"},
        in_pairs=True,
        experts="block_sparse_moe.experts",
        composed=OF_SHARED,
    ),
    "hunyuan-dense": Family("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM"),
    "hunyuan-moe": Family(
        "hunyuan_v1_moe",
        "HunYuanMoEV1ForCausalLM",
        {
            "expert_count": "num_experts",
            "expert_used_count": "moe_topk",
            "expert_feed_forward_length": "intermediate_size",
        },
    ),
    "lfm2": Family("lfm2", "Lfm2ForCausalLM", reads=(readings.convolutions,), epsilon="norm_eps"),
    "lfm2moe": Family(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        {**EXPERTS, "leading_dense_block_count": "num_dense_layers"},
        reads=(readings.convolutions,),
        epsilon="norm_eps",
    ),
    "llama": lambda header: MIXTRAL if header.get("expert_count") else LLAMA,
    "minimax-m2": Family("minimax_m2", "MiniMaxM2ForCausalLM", LOCAL_EXPERTS),
    "mistral3": lambda header: MISTRAL if header.get("attention.temperature_scale") is None else MINISTRAL3,
    "nemotron": Family("nemotron", "NemotronForCausalLM", norms_more=1.0, epsilon="norm_eps"),
    "nemotron_h": NEMOTRON_H,
    "nemotron_h_moe": NEMOTRON_H,
    "olmo2": lambda header: OLMO3 if header.get("attention.sliding_window") else OLMO2,
    "olmoe": Family("olmoe", "OlmoeForCausalLM", EXPERTS),
    "phi3": Family("phi3", "Phi3ForCausalLM", reads=(readings.window,)),
    "qwen2": QWEN2,
    "qwen2moe": Family("qwen2_moe", "Qwen2MoeForCausalLM", EXPERTS),
    "qwen2vl": QWEN2,
    "qwen3": QWEN3,
    "qwen35": Family(
        "qwen3_5_text", "Qwen3_5ForCausalLM", DELTA, reads=(readings.values,), norms_more=1.0, has_tiles=True
    ),
    "qwen35moe": Family(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        {**DELTA, **EXPERTS},
        reads=(readings.values,),
        norms_more=1.0,
        has_tiles=True,
    ),
    "qwen3moe": QWEN3_MOE,
    "qwen3next": Family(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        {**DELTA, **EXPERTS},
        reads=(readings.values,),
        norms_more=1.0,
        composed=BY_KEY_HEADS,
    ),
    "qwen3vl": QWEN3,
    "qwen3vlmoe": QWEN3_MOE,
    "seed_oss": Family("seed_oss", "SeedOssForCausalLM"),
    "smollm3": Family("smollm3", "SmolLM3ForCausalLM", in_pairs=True),
    "starcoder2": Family("starcoder2", "Starcoder2ForCausalLM", reads=(readings.window,), epsilon="norm_epsilon"),
}  # or what finds the family of an architecture that several have


def family_of(header: Header) -> Family:
    """Return a file's family; raises ValueError, naming the architecture, if none is known."""
    name, kind = header.architecture, header.metadata.get("general.type", MODEL)
    if name in TOWERS or kind in TOWERS:
        raise ValueError(f"{header.path}: is a tower (mmproj), which nobody reads: give the language model's file")
    if kind != MODEL:
        raise ValueError(f"{header.path}: general.type in its metadata is {kind!r}: must be {MODEL!r}")
    if name not in FAMILIES:
        raise ValueError(
            f"{header.path}: general.architecture={name!r} is not supported in GGUF: must be one of"
            f" {', '.join(FAMILIES)}; others run from the safetensors files that they were made from"
        )
    found = FAMILIES[name]
    return found if isinstance(found, Family) else found(header)
