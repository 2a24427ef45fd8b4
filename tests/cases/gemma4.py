"""Cases of Gemma 4, whose layers without a window have other heads than those with one."""

from __future__ import annotations

from cases.case import VOCAB, Case

KINDS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 24, "global_head_dim": 32}
FEWER = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
GEMMA4_UNIFIED = {**KINDS, **FEWER}
DENSE = {**KINDS, "hidden_size_per_layer_input": 0}
GEMMA4_SMALL = {**DENSE, **FEWER}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 32}
INPUTS = {"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": VOCAB}
SHARED = {"num_hidden_layers": 6, "num_kv_shared_layers": 2, "layer_types": 3 * KINDS["layer_types"][:2]}

GEMMA4 = {
    "gemma4 biases, no cap": Case("Gemma4ForCausalLM", "gemma4_text", {**DENSE, "attention_bias": True}),
    "gemma4 heads of one size": Case("Gemma4ForCausalLM", "gemma4_text", {**DENSE, "global_head_dim": 16}),
    "gemma4 experts": Case("Gemma4ForCausalLM", "gemma4_text", {**GEMMA4_SMALL, **GEMMA4_EXPERTS}),
    "gemma4 cap, fewer heads": Case(
        "Gemma4ForCausalLM", "gemma4_text", {**GEMMA4_SMALL, "final_logit_softcapping": 30.0}
    ),
    "gemma4 layer inputs": Case("Gemma4ForCausalLM", "gemma4_text", {**KINDS, **INPUTS}),
    "gemma4": Case(
        "Gemma4ForCausalLM",
        "gemma4_text",
        {**KINDS, **INPUTS, **SHARED, "use_double_wide_mlp": True, "final_logit_softcapping": 30.0},
    ),
    "gemma4unified shared keys and values": Case(
        "Gemma4UnifiedForCausalLM", "gemma4_unified_text", {**GEMMA4_UNIFIED, **SHARED}
    ),
    "gemma4unified": Case(
        "Gemma4UnifiedForCausalLM",
        "gemma4_unified_text",
        {**GEMMA4_UNIFIED, "tie_word_embeddings": False, "final_logit_softcapping": 5.0},
    ),
}
