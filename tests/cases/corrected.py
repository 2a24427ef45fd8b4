"""Cases of models whose routers correct the scores for the choice."""

from __future__ import annotations

from cases.case import YARN, Case

WINDOWS = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2}
FEW = {"num_experts_per_tok": 3, "moe_intermediate_size": 32}
GLM = {**FEW, "n_routed_experts": 6}
HY = {**FEW, "num_experts": 6, "num_shared_experts": 1}
GROUPS = {"n_routed_experts": 12, "n_group": 4, "topk_group": 2}
MINIMAX = {"num_local_experts": 6, "num_experts_per_tok": 3}
KOLIBRI = {**FEW, "num_experts": 6, "shared_expert_intermediate_size": 40}
MIMO = {**GLM, "head_dim": 24, "v_head_dim": 16}
ERNIE = {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 32}
LFM2 = {
    **FEW,
    "num_experts": 6,
    "num_dense_layers": 1,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
}

CORRECTED = {
    "glm4moe": Case("Glm4MoeForCausalLM", "glm4_moe", GLM),
    "glm4moe groups, biases, norms, two dense layers": Case(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        {
            **GLM,
            **GROUPS,
            "attention_bias": True,
            "use_qk_norm": True,
            "first_k_dense_replace": 2,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {**YARN, "partial_rotary_factor": 0.5},
        },
    ),
    "minimax-m2": Case("MiniMaxM2ForCausalLM", "minimax_m2", {**MINIMAX, "rotary_dim": 8}),
    "minimax-m2 yarn": Case("MiniMaxM2ForCausalLM", "minimax_m2", {**MINIMAX, "rope_parameters": YARN}),
    "dots1": Case("Dots1ForCausalLM", "dots1", {**GLM, "n_shared_experts": 1}),
    "dots1 windows, groups, biases": Case(
        "Dots1ForCausalLM",
        "dots1",
        {
            **GLM,
            **GROUPS,
            **WINDOWS,
            "attention_bias": True,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
    ),
    "solar-open": Case("SolarOpenForCausalLM", "solar_open", {**GLM, "n_group": 3, "topk_group": 3}),
    "solar-open groups, biases": Case(
        "SolarOpenForCausalLM",
        "solar_open",
        {
            **GLM,
            **GROUPS,
            "attention_bias": True,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 0.7,
            "rope_parameters": YARN,
        },
    ),
    "hy3": Case("HYV3ForCausalLM", "hy_v3", HY),
    "hy3 biases, some layers": Case(
        "HYV3ForCausalLM",
        "hy_v3",
        {
            **HY,
            "num_shared_experts": 2,
            "attention_bias": True,
            "mlp_bias": True,
            "mlp_layer_types": ["sparse", "dense", "sparse", "dense"],
            "router_scaling_factor": 0.8,
        },
    ),
    "exaonemoe": Case("ExaoneMoeForCausalLM", "exaone_moe", {**HY, "sliding_window": 24}),
    "exaonemoe windows, groups, some layers": Case(
        "ExaoneMoeForCausalLM",
        "exaone_moe",
        {
            **HY,
            **WINDOWS,
            "num_experts": 12,
            "n_group": 4,
            "topk_group": 2,
            "num_shared_experts": 2,
            "mlp_layer_types": ["sparse", "dense", "sparse", "dense"],
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.3,
        },
    ),
    "ernie4.5moe": Case("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", ERNIE),
    "ernie4.5moe some layers, small sums, no shared experts": Case(
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        {
            **ERNIE,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 2,
            "moe_norm_min": 0.4,
            "moe_num_shared_experts": 0,
            "tie_word_embeddings": False,
        },
    ),
    "ernie4.5moe every second layer": Case(
        "Ernie4_5_MoeForCausalLM", "ernie4_5_moe", {**ERNIE, "moe_layer_interval": 2, "moe_layer_start_index": 0}
    ),
    "lfm2moe without correction": Case(
        "Lfm2MoeForCausalLM",
        "lfm2_moe",
        {
            **LFM2,
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "conv_bias": True,
            "num_dense_layers": 2,
            "tie_word_embeddings": False,
        },
        keeps_states=True,
    ),
    "lfm2moe": Case(
        "Lfm2MoeForCausalLM", "lfm2_moe", {**LFM2, "routed_scaling_factor": 1.8}, keeps_states=True
    ),
    "afmoe": Case("AfmoeForCausalLM", "afmoe", {**HY, "sliding_window": 24}),
    "afmoe muP, dense layers": Case(
        "AfmoeForCausalLM",
        "afmoe",
        {
            **HY,
            **WINDOWS,
            "num_dense_layers": 2,
            "num_shared_experts": 2,
            "mup_enabled": True,
            "route_scale": 1.9,
            "n_group": 2,  # the class has no groups, whatever a config says
            "topk_group": 1,
            "rope_parameters": YARN,
        },
    ),
    "mimo-v2": Case("MiMoV2FlashForCausalLM", "mimo_v2_flash", {**MIMO, **WINDOWS}),
    "mimo-v2 other sizes, groups, biases, stretched rotation": Case(
        "MiMoV2FlashForCausalLM",
        "mimo_v2_flash",
        {
            **GLM,
            **GROUPS,
            **WINDOWS,
            "head_dim": 20,
            "v_head_dim": 26,
            "attention_bias": True,
            "attention_value_scale": None,
            "mlp_layer_types": ["sparse", "dense"] * 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {
                "full_attention": {**YARN, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "kolibri windows in all layers, weights that add up": Case(
        "Kolibri1ForCausalLM",
        "kolibri1",
        {
            **KOLIBRI,
            "sliding_window": 17,
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
        },
    ),
    "kolibri": Case(
        "Kolibri1ForCausalLM", "kolibri1", {**KOLIBRI, **WINDOWS, "rope_parameters": YARN}
    ),
}  # fmt: skip
