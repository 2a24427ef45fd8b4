"""Cases of models whose layers all have an MLP."""

from __future__ import annotations

from cases.case import LINEAR, LLAMA3, LONGROPE, YARN, Case

DENSE = {
    "llama": Case("LlamaForCausalLM", "llama"),
    "llama tied, linear rope": Case(
        "LlamaForCausalLM", "llama", {"tie_word_embeddings": True, "rope_parameters": LINEAR}
    ),
    "llama llama3 rope, its length beside it": Case(
        "LlamaForCausalLM", "llama", {"rope_parameters": LLAMA3, "original_max_position_embeddings": 16}
    ),
    "llama yarn": Case(
        "LlamaForCausalLM", "llama", {"rope_parameters": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.7}}
    ),
    "llama biases, llama3 rope": Case(
        "LlamaForCausalLM", "llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}
    ),
    "seedoss biases of the output and the MLP": Case(
        "SeedOssForCausalLM",
        "seed_oss",
        {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True, "rope_parameters": YARN},
    ),
    "seedoss": Case("SeedOssForCausalLM", "seed_oss"),
    "ernie4.5 tied, without biases, linear rope": Case(
        "Ernie4_5ForCausalLM", "ernie4_5", {"use_bias": False, "tie_word_embeddings": True, "rope_parameters": LINEAR}
    ),
    "ernie4.5": Case("Ernie4_5ForCausalLM", "ernie4_5", {"use_bias": True, "tie_word_embeddings": False}),
    "cwm": Case("CwmForCausalLM", "cwm", {"bos_token_id": 0, "sliding_window": 24, "rope_parameters": LLAMA3}),
    "cwm biases, other windows": Case(
        "CwmForCausalLM",
        "cwm",
        {
            "bos_token_id": 0,
            "mlp_bias": True,
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": LLAMA3,
        },
    ),
    "exaone4 windows by a pattern": Case("Exaone4ForCausalLM", "exaone4", {"sliding_window": 24}),
    "exaone4 without windows": Case(
        "Exaone4ForCausalLM", "exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}
    ),
    "exaone4 windows, llama3 rope": Case(
        "Exaone4ForCausalLM",
        "exaone4",
        {
            "sliding_window": 33,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "rope_parameters": LLAMA3,
            "tie_word_embeddings": True,
        },
    ),
    "helium": Case("HeliumForCausalLM", "helium", {"hidden_size": 64}),
    "helium biases": Case("HeliumForCausalLM", "helium", {"hidden_size": 64, "attention_bias": True, "mlp_bias": True}),
    "mistral": Case("MistralForCausalLM", "mistral", {"sliding_window": None}),
    "mistral window": Case("MistralForCausalLM", "mistral", {"sliding_window": 24}),
    "ministral": Case("MinistralForCausalLM", "ministral", {"sliding_window": 24}),
    "ministral windows in some layers": Case(
        "MinistralForCausalLM",
        "ministral",
        {"sliding_window": 24, "layer_types": ["full_attention", "sliding_attention"] * 2},
    ),
    "ministral3": Case(
        "Ministral3ForCausalLM",
        "ministral3",
        {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.3}, "sliding_window": None},
    ),
    "ministral3 window": Case(
        "Ministral3ForCausalLM",
        "ministral3",
        {
            "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1},
            "original_max_position_embeddings": 32,
            "sliding_window": 50,
        },
    ),
    "qwen2": Case("Qwen2ForCausalLM", "qwen2"),
    "qwen2 yarn, windows": Case(
        "Qwen2ForCausalLM",
        "qwen2",
        {"rope_parameters": YARN, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2},
    ),
    "qwen3": Case("Qwen3ForCausalLM", "qwen3"),
    "qwen3 biases, yarn, windows": Case(
        "Qwen3ForCausalLM",
        "qwen3",
        {
            "attention_bias": True,
            "rope_parameters": YARN,
            "use_sliding_window": True,
            "sliding_window": 33,
            "max_window_layers": 1,
        },
    ),
    "phi3": Case("Phi3ForCausalLM", "phi3", {"sliding_window": 47}),
    "phi3 partial": Case(
        "Phi3ForCausalLM",
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    ),
    "phi3 as in Phi-4-mini: tied, longrope on a share of each head": Case(
        "Phi3ForCausalLM",
        "phi3",
        {
            "rope_parameters": {
                **{name: x[:6] if "factor" in name else x for name, x in LONGROPE.items()},
                "partial_rotary_factor": 0.75,
            },
            "original_max_position_embeddings": 42,
            "hidden_size": 64,
            "tie_word_embeddings": True,
        },
    ),
    "phi3 longrope": Case(
        "Phi3ForCausalLM",
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 42, "hidden_size": 64},
    ),
    "gemma": Case("GemmaForCausalLM", "gemma"),
    "gemma biases, an own head": Case(
        "GemmaForCausalLM", "gemma", {"attention_bias": True, "tie_word_embeddings": False, "hidden_act": "gelu"}
    ),
    "gemma2": Case("Gemma2ForCausalLM", "gemma2", {"sliding_window": 24, "query_pre_attn_scalar": 24}),
    "gemma2 without caps": Case(
        "Gemma2ForCausalLM",
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    ),
    "gemma2 low caps": Case(
        "Gemma2ForCausalLM", "gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    ),
    "vaultgemma": Case("VaultGemmaForCausalLM", "vaultgemma", {"sliding_window": 24, "query_pre_attn_scalar": 24}),
    "vaultgemma without caps": Case(
        "VaultGemmaForCausalLM",
        "vaultgemma",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    ),
    "vaultgemma low caps, other windows": Case(
        "VaultGemmaForCausalLM",
        "vaultgemma",
        {
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "sliding_window": 40,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
    ),
    "gemma3": Case(
        "Gemma3ForCausalLM",
        "gemma3_text",
        {"sliding_window": 24, "sliding_window_pattern": 3, "query_pre_attn_scalar": 20},
    ),
    "gemma3 linear": Case(
        "Gemma3ForCausalLM",
        "gemma3_text",
        {
            "sliding_window": 64,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "rope_local_base_freq": 500.0,
            "final_logit_softcapping": 5.0,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "gemma3 yarn, a length that does not count": Case(
        "Gemma3ForCausalLM",
        "gemma3_text",
        {
            "sliding_window": 64,
            "rope_parameters": {"sliding_attention": LINEAR, "full_attention": YARN},
            "original_max_position_embeddings": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "olmo2": Case("Olmo2ForCausalLM", "olmo2"),
    "olmo2 biases": Case("Olmo2ForCausalLM", "olmo2", {"attention_bias": True, "num_key_value_heads": 4}),
    "olmo3": Case(
        "Olmo3ForCausalLM",
        "olmo3",
        {"sliding_window": 24, "rope_scaling": {k: v for k, v in YARN.items() if k != "rope_theta"}},
    ),
    "granite": Case(
        "GraniteForCausalLM",
        "granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.5,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "hyperclovax": Case(
        "HyperCLOVAXForCausalLM",
        "hyperclovax",
        {"logits_scaling": 0.5, "embedding_multiplier": 3.0, "attention_multiplier": 0.2},
    ),
    "hyperclovax without norms of results, biases": Case(
        "HyperCLOVAXForCausalLM",
        "hyperclovax",
        {"use_post_norm": False, "residual_multiplier": 0.4, "attention_bias": True, "mlp_bias": True},
    ),
    "graniteswa": Case("GraniteSWAForCausalLM", "granite_swa", {"attention_multiplier": 0.2}),
    "graniteswa windows, layers without rope, biases": Case(
        "GraniteSWAForCausalLM",
        "granite_swa",
        {
            "sliding_window": 24,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "layer_rope_theta": [0, 500.0, 10000.0, 500.0],
            "residual_multiplier": 0.4,
            "logits_scaling": 2.5,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "smollm3": Case("SmolLM3ForCausalLM", "smollm3"),
    "smollm3 windows, biases": Case(
        "SmolLM3ForCausalLM",
        "smollm3",
        {
            "no_rope_layers": [1, 0, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 30,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "glm without biases": Case(
        "GlmForCausalLM",
        "glm",
        {
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        },
    ),
    "glm": Case("GlmForCausalLM", "glm"),
    "glm4 without biases": Case(
        "Glm4ForCausalLM",
        "glm4",
        {
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        },
    ),
    "glm4": Case("Glm4ForCausalLM", "glm4"),
    "apertus biases, another activation": Case(
        "ApertusForCausalLM", "apertus", {"attention_bias": True, "hidden_act": "gelu", "rope_parameters": YARN}
    ),
    "apertus": Case("ApertusForCausalLM", "apertus"),
    "apertus1.5 with a logit for each token": Case("Apertus1p5TextForCausalLM", "apertus1p5_text"),
    "apertus1.5": Case("Apertus1p5TextForCausalLM", "apertus1p5_text", {"vocab_size": 200, "output_vocab_size": 160}),
}
