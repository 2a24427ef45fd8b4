"""Cases of models whose layers have experts."""

from __future__ import annotations

from cases.case import LONGROPE, YARN, Case

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}

DBRX = {"moe_num_experts": 5, "moe_top_k": 2, "ffn_hidden_size": 24}
WIDE = {"hidden_size": 64, "d_model": 64}  # the experts' config is made of d_model

GRANITE = {"num_local_experts": 5, "num_experts_per_tok": 2, "attention_multiplier": 0.2}  # 1, its default, magnifies

GPT_OSS = {
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "rope_parameters": {**YARN, "truncate": False},
}

SPARSE = {
    "mixtral": Case("MixtralForCausalLM", "mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral window": Case("MixtralForCausalLM", "mixtral", {"num_local_experts": 4, "sliding_window": 24}),
    "granitemoe": Case("GraniteMoeForCausalLM", "granitemoe", GRANITE),
    "granitemoe multipliers, biases": Case(
        "GraniteMoeForCausalLM",
        "granitemoe",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.5,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "granitemoeshared": Case(
        "GraniteMoeSharedForCausalLM",
        "granitemoeshared",
        {**GRANITE, "shared_intermediate_size": 24, "residual_multiplier": 0.4},
    ),
    "granitemoeshared without a shared expert": Case(
        "GraniteMoeSharedForCausalLM",
        "granitemoeshared",
        {**GRANITE, "shared_intermediate_size": 0},
    ),
    "granitemoeswa": Case(
        "GraniteMoeSWAForCausalLM",
        "granitemoe_swa",
        {**GRANITE, "sliding_window": 24, "logits_scaling": 2.5},
    ),
    "hunyuanmoe alpha, biases, a count a layer": Case(
        "HunYuanMoEV1ForCausalLM",
        "hunyuan_v1_moe",
        {
            "num_experts": 6,
            "moe_topk": [2] * 4,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0},
        },
    ),
    "hunyuanmoe": Case("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", {"num_experts": 6, "moe_topk": 3}),
    "phimoe biases, window": Case(
        "PhimoeForCausalLM",
        "phimoe",
        {
            "num_local_experts": 6,
            "router_jitter_noise": 0.3,
            "sliding_window": 24,
            "attention_bias": True,
            "lm_head_bias": True,
        },
    ),
    "phimoe longrope": Case(
        "PhimoeForCausalLM",
        "phimoe",
        {
            "num_local_experts": 6,
            "rope_parameters": {
                **LONGROPE,
                "original_max_position_embeddings": 320,
                "short_mscale": 1.2,
                "long_mscale": 1.3,
            },
        },
    ),
    "phimoe": Case("PhimoeForCausalLM", "phimoe", {"num_local_experts": 6, "tie_word_embeddings": True}),
    "dbrx weights as they are": Case(
        "DbrxForCausalLM",
        "dbrx",
        {
            **WIDE,
            "num_key_value_heads": 4,
            "attn_config": {"kv_n_heads": 4, "clip_qkv": 5, "rope_theta": 10000.0},
            "ffn_config": {**DBRX, "moe_top_k": 3, "moe_normalize_expert_weights": None},
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "dbrx": Case(
        "DbrxForCausalLM",
        "dbrx",
        {
            **WIDE,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.8, "rope_theta": 10000.0},
            "ffn_config": DBRX,
        },
    ),
    "flint": Case(
        "FlintForCausalLM",
        "flint",
        {
            **EXPERTS,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "sliding_window": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "flint biases, weights as they are": Case(
        "FlintForCausalLM",
        "flint",
        {
            **EXPERTS,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "sliding_window": 17,
            "norm_topk_prob": False,
            "mlp_only_layers": [],
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "olmoe": Case("OlmoeForCausalLM", "olmoe", {**EXPERTS, "hidden_size": 64}),
    "olmoe biases": Case(
        "OlmoeForCausalLM",
        "olmoe",
        {**EXPERTS, "hidden_size": 64, "attention_bias": True, "norm_topk_prob": True, "num_experts_per_tok": 1},
    ),
    "flexolmo": Case("FlexOlmoForCausalLM", "flex_olmo", {**EXPERTS, "hidden_size": 64}),
    "flexolmo biases, weights that add up": Case(
        "FlexOlmoForCausalLM",
        "flex_olmo",
        {**EXPERTS, "hidden_size": 64, "attention_bias": True, "norm_topk_prob": True, "rope_parameters": YARN},
    ),
    "qwen2moe": Case(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        {
            **EXPERTS,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [2],
            "use_sliding_window": True,
            "sliding_window": 20,
        },
    ),
    "qwen2moe without biases": Case(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        {
            **EXPERTS,
            "shared_expert_intermediate_size": 40,
            "decoder_sparse_step": 2,
            "qkv_bias": False,
            "norm_topk_prob": True,
        },
    ),
    "qwen3moe": Case("Qwen3MoeForCausalLM", "qwen3_moe", {**EXPERTS, "norm_topk_prob": True}),
    "qwen3moe without experts": Case("Qwen3MoeForCausalLM", "qwen3_moe", {**EXPERTS, "num_experts": 0}),
    "qwen3moe window, biases, some layers": Case(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        {
            **EXPERTS,
            "attention_bias": True,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "use_sliding_window": True,
            "sliding_window": 24,
        },
    ),
    "gptoss": Case("GptOssForCausalLM", "gpt_oss", {**GPT_OSS, "sliding_window": 24}),
    "gptoss no biases of attention, other limits": Case(
        "GptOssForCausalLM",
        "gpt_oss",
        {
            **GPT_OSS,
            "attention_bias": False,
            "swiglu_alpha": 1.2,
            "swiglu_limit": 0.7,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "mellum": Case("MellumForCausalLM", "mellum", EXPERTS),
    "mellum windows, biases, some layers": Case(
        "MellumForCausalLM",
        "mellum",
        {
            **EXPERTS,
            "norm_topk_prob": False,
            "attention_bias": True,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": YARN,
            },
        },
    ),
}
