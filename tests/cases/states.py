"""Cases of models some of whose layers remember a state of fixed size."""

from __future__ import annotations

from dataclasses import replace

from cases.case import YARN, Case
from cases.sparse import EXPERTS

DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32}
DELTA_MOE = {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 40}
KINDS = {"layer_types": ["conv", "full_attention"] * 2}
UNEVEN = {
    **DELTA,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 24,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
NOT_ROTATED = {"rope_type": "default", "rope_theta": None}

MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 24, "mamba_n_groups": 2}
GRANITE = {
    **MAMBA,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
}
FALCON = {
    "mamba_n_heads": 6,
    "mamba_d_ssm": 72,
    "mamba_d_state": 24,
    "num_hidden_layers": 3,
    "embedding_multiplier": 2.5,
    "lm_head_multiplier": 0.6,
    "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 0.7,
    "key_multiplier": 0.4,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.35, 0.9, 0.7, 1.3, 0.8],
    "mlp_multipliers": [0.88, 0.6],
}
NEMOTRON = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "ssm_state_size": 24,
    "layer_types": ["linear_attention", "mlp", "full_attention", "mlp"],
    "num_hidden_layers": None,
}
NEMOTRON_3 = {
    **NEMOTRON,
    "layer_types": ["linear_attention", "moe", "full_attention", "moe", "mlp"],
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 2.5,
}

CASES = {
    "bamba": Case("BambaForCausalLM", "bamba", {**MAMBA, "attn_layer_indices": [1, 3]}),
    "bamba limits, biases": Case(
        "BambaForCausalLM",
        "bamba",
        {
            **MAMBA,
            "attn_layer_indices": [2],
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "mlp_bias": True,
            "attention_bias": True,
            "time_step_limit": [0.6, 1.0],
        },
    ),
    "falconh1 norm before the gate, biases": Case(
        "FalconH1ForCausalLM",
        "falcon_h1",
        {
            **FALCON,
            "mamba_n_groups": 2,
            "mamba_rms_norm": True,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "falconh1 norm behind the gate": Case(
        "FalconH1ForCausalLM",
        "falcon_h1",
        {**FALCON, "mamba_n_groups": 2, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "falconh1": Case("FalconH1ForCausalLM", "falcon_h1", FALCON),
    "nemotronh": Case("NemotronHForCausalLM", "nemotron_h", NEMOTRON),
    "nemotronh biases, branches in another order": Case(
        "NemotronHForCausalLM",
        "nemotron_h",
        {
            **NEMOTRON,
            "layer_types": ["mlp", "linear_attention", "linear_attention", "full_attention", "mlp", "mlp"],
            "use_bias": True,
            "mlp_bias": True,
            "use_conv_bias": False,
        },
    ),
    "nemotronh latents of experts in groups, biases": Case(
        "NemotronHForCausalLM",
        "nemotron_h",
        {
            **NEMOTRON_3,
            "layer_types": ["moe", "full_attention", "linear_attention", "moe"],
            "n_routed_experts": 12,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "moe_latent_size": 20,
            "norm_topk_prob": False,
            "mlp_bias": True,
        },
    ),
    "nemotronh experts": Case("NemotronHForCausalLM", "nemotron_h", NEMOTRON_3),
    "nemotronh experts, two that all tokens take": Case(
        "NemotronHForCausalLM", "nemotron_h", {**NEMOTRON_3, "moe_shared_expert_intermediate_size": 48}
    ),
    "granitemoehybrid": Case(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        {**GRANITE, "num_local_experts": 0, "shared_intermediate_size": 48},
    ),
    "granitemoehybrid experts, rotated": Case(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        {
            **GRANITE,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 40,
            "position_embedding_type": "rope",
        },
    ),
    "granitemoehybrid experts, two that all tokens take": Case(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        {
            **GRANITE,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 24,
            "shared_intermediate_size": 48,
        },
    ),
    "olmohybrid rotated, one key head a value head, strengths of at most 1": Case(
        "OlmoHybridForCausalLM",
        "olmo_hybrid",
        {**UNEVEN, "linear_num_key_heads": 4, "linear_allow_neg_eigval": False, "rope_parameters": YARN},
    ),
    "qwen3.5 yarn, biases": Case(
        "Qwen3_5ForCausalLM",
        "qwen3_5_text",
        {**DELTA, "attention_bias": True, "rope_parameters": {**YARN, "partial_rotary_factor": 0.5}},
    ),
    "qwen3.5": Case("Qwen3_5ForCausalLM", "qwen3_5_text", DELTA),
    "qwen3.5moe": Case("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", DELTA_MOE),
    "qwen3next": Case("Qwen3NextForCausalLM", "qwen3_next", {**DELTA_MOE, "mlp_only_layers": [1]}),
    "olmohybrid": Case("OlmoHybridForCausalLM", "olmo_hybrid", {**UNEVEN, "rope_parameters": NOT_ROTATED}),
    "lfm2": Case("Lfm2ForCausalLM", "lfm2", KINDS),
    "lfm2 biases, another width": Case(
        "Lfm2ForCausalLM", "lfm2", {**KINDS, "conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False}
    ),
}

STATES = {name: replace(case, keeps_states=True) for name, case in CASES.items()}
