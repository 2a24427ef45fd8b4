"""Cases of Gemma 4, whose layers without a window have other heads than those with one."""

from __future__ import annotations

from cases.case import Case

KINDS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 24, "global_head_dim": 32}
FEWER = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
GEMMA4_UNIFIED = {**KINDS, **FEWER}
DENSE = {**KINDS, "hidden_size_per_layer_input": 0}
GEMMA4_SMALL = {**DENSE, **FEWER}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 32}

GEMMA4 = {
    "gemma4 biases, no cap": Case("Gemma4ForCausalLM", "gemma4_text", {**DENSE, "attention_bias": True}),
    "gemma4 heads of one size": Case("Gemma4ForCausalLM", "gemma4_text", {**DENSE, "global_head_dim": 16}),
    "gemma4 experts": Case("Gemma4ForCausalLM", "gemma4_text", {**GEMMA4_SMALL, **GEMMA4_EXPERTS}),
    "gemma4": Case("Gemma4ForCausalLM", "gemma4_text", {**GEMMA4_SMALL, "final_logit_softcapping": 30.0}),
    "gemma4unified": Case(
        "Gemma4UnifiedForCausalLM",
        "gemma4_unified_text",
        {**GEMMA4_UNIFIED, "tie_word_embeddings": False, "final_logit_softcapping": 5.0},
    ),
}
