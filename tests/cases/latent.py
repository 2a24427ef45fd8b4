"""Cases of models with latent attention, whose heads' keys and values are made of one latent a token."""

from __future__ import annotations

from typing import Any

from cases.case import YARN, Case

SIZES = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "kv_lora_rank": 40,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
EXPERTS = {"n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
GROUPS = {"n_group": 4, "topk_group": 2}
ZEROS = {"n_routed_experts": 10, "zero_expert_num": 5, "moe_topk": 4, "expert_ffn_hidden_size": 32}
NO_GROUPS = {"n_group": 1, "topk_group": 1}
V2 = {**SIZES, **EXPERTS}
LARGE_SCORES = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.4],
    "long_factor": [1.5, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 64,
}
MISTRAL = {**YARN, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0}

LATENT = {
    "deepseek-v2 groups, biases": Case(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        {
            **V2,
            **GROUPS,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.5,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": LARGE_SCORES,
        },
    ),
    "deepseek-v2": Case("DeepseekV2ForCausalLM", "deepseek_v2", {**V2, "q_lora_rank": None}),
    "deepseek-v3 groups, biases": Case(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        {
            **V2,
            **GROUPS,
            "q_lora_rank": None,
            "attention_bias": True,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "rope_parameters": LARGE_SCORES,
        },
    ),
    "deepseek-v3 halves": Case(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        {**V2, **NO_GROUPS, "rope_interleave": False, "num_nextn_predict_layers": 0},
    ),
    "deepseek-v3": Case("DeepseekV3ForCausalLM", "deepseek_v3", {**V2, **GROUPS}),
    "glm4moelite": Case(
        "Glm4MoeLiteForCausalLM",
        "glm4_moe_lite",
        {**SIZES, **EXPERTS, "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]},
    ),
    "longcat yarn, biases": Case(
        "LongcatFlashForCausalLM",
        "longcat_flash",
        {**SIZES, **ZEROS, "zero_expert_num": 0, "attention_bias": True, "rope_parameters": LARGE_SCORES},
    ),
    "longcat": Case("LongcatFlashForCausalLM", "longcat_flash", {**SIZES, **ZEROS}),
    "minicpm3 longrope": Case(
        "MiniCPM3ForCausalLM",
        "minicpm3",
        {**SIZES, "scale_depth": None, "dim_model_base": None, "rope_parameters": LONGROPE},
    ),
    "minicpm3": Case("MiniCPM3ForCausalLM", "minicpm3", {**SIZES, "dim_model_base": 24}),
    "mistral4 groups": Case(
        "Mistral4ForCausalLM",
        "mistral4",
        {**V2, **GROUPS, "head_dim": 24, "rope_parameters": {**MISTRAL, "llama_4_scaling_beta": 0.1}},
    ),
    "mistral4": Case(
        "Mistral4ForCausalLM",
        "mistral4",
        {**V2, "head_dim": 24, "norm_topk_prob": False, "rope_parameters": {**MISTRAL, "llama_4_scaling_beta": 0.3}},
    ),
    "youtu": Case("YoutuForCausalLM", "youtu", SIZES),
}
