"""Cases of models with LayerNorms, MLPs without gates, or branches side by side."""

from __future__ import annotations

from typing import Any

from cases.case import YARN, Case

ROTATED = {"rope_theta": 10000.0, "partial_rotary_factor": 0.5, "rope_type": "default"}
KINDS = ["sliding_attention", "full_attention"] * 2


MODERNBERT = {"local_attention": 48, "bos_token_id": 0, "pad_token_id": 0}


def wide(**settings: Any) -> dict[str, Any]:
    """Return settings with hidden sizes that four heads of 16 numbers fill, as these classes need them."""
    return {"hidden_size": 64, **settings}


CLASSICS = {
    "gpt2 wide, another activation": Case("GPT2LMHeadModel", "gpt2", wide(n_inner=96, activation_function="relu")),
    "gpt2": Case("GPT2LMHeadModel", "gpt2", wide()),
    "gptbigcode heads of their own": Case("GPTBigCodeForCausalLM", "gpt_bigcode", wide(multi_query=False)),
    "gptbigcode": Case("GPTBigCodeForCausalLM", "gpt_bigcode", wide(multi_query=True)),
    "gptneox one after the other": Case(
        "GPTNeoXForCausalLM", "gpt_neox", wide(use_parallel_residual=False, attention_bias=False)
    ),
    "gptneox tied": Case("GPTNeoXForCausalLM", "gpt_neox", wide(rope_parameters=ROTATED, tie_word_embeddings=True)),
    "gptneox": Case("GPTNeoXForCausalLM", "gpt_neox", wide()),
    "gptj all of a head": Case("GPTJForCausalLM", "gptj", wide(rotary_dim=16)),
    "gptj": Case("GPTJForCausalLM", "gptj", wide(rotary_dim=8)),
    "codegen": Case("CodeGenForCausalLM", "codegen", wide(rotary_dim=8)),
    "opt norms behind sums": Case(
        "OPTForCausalLM", "opt", wide(ffn_dim=96, word_embed_proj_dim=64, do_layer_norm_before=False)
    ),
    "opt without biases and weights": Case(
        "OPTForCausalLM",
        "opt",
        wide(ffn_dim=96, word_embed_proj_dim=64, enable_bias=False, layer_norm_elementwise_affine=False),
    ),
    "opt without the last norm": Case(
        "OPTForCausalLM", "opt", wide(ffn_dim=96, word_embed_proj_dim=64, _remove_final_layer_norm=True)
    ),
    "opt small embeddings, with a head of its own": Case(
        "OPTForCausalLM", "opt", wide(ffn_dim=96, word_embed_proj_dim=32, tie_word_embeddings=False)
    ),
    "opt another activation": Case(
        "OPTForCausalLM", "opt", wide(ffn_dim=96, word_embed_proj_dim=64, activation_function="gelu")
    ),
    "opt": Case("OPTForCausalLM", "opt", wide(ffn_dim=96, word_embed_proj_dim=32, do_layer_norm_before=False)),
    "phi head norms": Case("PhiForCausalLM", "phi", wide(qk_layernorm=True)),
    "phi": Case("PhiForCausalLM", "phi", wide(rope_parameters=ROTATED)),
    "persimmon without head norms": Case("PersimmonForCausalLM", "persimmon", wide(qk_layernorm=False)),
    "persimmon": Case("PersimmonForCausalLM", "persimmon", wide()),
    "starcoder2 without biases": Case(
        "Starcoder2ForCausalLM", "starcoder2", wide(use_bias=False, tie_word_embeddings=False, rope_parameters=YARN)
    ),
    "starcoder2": Case("Starcoder2ForCausalLM", "starcoder2", wide(sliding_window=24)),
    "cohere head norms": Case("CohereForCausalLM", "cohere", wide(use_qk_norm=True, attention_bias=True)),
    "cohere": Case("CohereForCausalLM", "cohere", wide(logit_scale=0.3)),
    "cohere2 biases": Case(
        "Cohere2ForCausalLM", "cohere2", {"attention_bias": True, "sliding_window": 24, "layer_types": KINDS}
    ),
    "cohere2": Case("Cohere2ForCausalLM", "cohere2", {"sliding_window": 24}),
    "modernbert an own head, biases, other activations": Case(
        "ModernBertDecoderForCausalLM",
        "modernbert-decoder",
        wide(
            **MODERNBERT,
            tie_word_embeddings=False,
            norm_bias=True,
            attention_bias=True,
            mlp_bias=True,
            classifier_bias=True,
            hidden_activation="silu",
            classifier_activation="relu",
        ),
    ),
    "modernbert without biases": Case(
        "ModernBertDecoderForCausalLM", "modernbert-decoder", wide(**MODERNBERT, decoder_bias=False)
    ),
    "modernbert": Case("ModernBertDecoderForCausalLM", "modernbert-decoder", wide(**MODERNBERT)),
    "stablelm side by side, head norms": Case(
        "StableLmForCausalLM", "stablelm", wide(use_parallel_residual=True, qk_layernorm=True, rope_parameters=ROTATED)
    ),
    "stablelm": Case("StableLmForCausalLM", "stablelm", wide(use_qkv_bias=True)),
    "olmo clamped": Case("OlmoForCausalLM", "olmo", wide(clip_qkv=0.7, attention_bias=True)),
    "olmo": Case("OlmoForCausalLM", "olmo", wide()),
    "nemotron biases": Case("NemotronForCausalLM", "nemotron", {"attention_bias": True, "mlp_bias": True}),
    "nemotron": Case("NemotronForCausalLM", "nemotron", {"rope_parameters": ROTATED}),
    "jais2": Case("Jais2ForCausalLM", "jais2"),
    "arcee biases": Case("ArceeForCausalLM", "arcee", {"attention_bias": True, "mlp_bias": True}),
    "arcee": Case("ArceeForCausalLM", "arcee", {"rope_parameters": YARN}),
    "nanochat": Case("NanoChatForCausalLM", "nanochat", {"final_logit_softcapping": 4.0, "attention_bias": True}),
    "hunyuandense alpha": Case(
        "HunYuanDenseV1ForCausalLM",
        "hunyuan_v1_dense",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0}},
    ),
    "hunyuandense": Case("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", {"attention_bias": True}),
    "bloom": Case("BloomForCausalLM", "bloom", wide()),
    "mpt clamped, another scale": Case(
        "MptForCausalLM",
        "mpt",
        wide(max_seq_len=512, attn_config={"clip_qkv": 0.7, "softmax_scale": 0.2}),
    ),
    "mpt": Case("MptForCausalLM", "mpt", wide(max_seq_len=512)),
    "falcon 7b": Case("FalconForCausalLM", "falcon", wide(num_kv_heads=4)),
    "falcon 7b, heads of their own": Case(
        "FalconForCausalLM", "falcon", wide(num_kv_heads=4, bias=True, multi_query=False)
    ),
    "falcon rw": Case(
        "FalconForCausalLM",
        "falcon",
        wide(num_kv_heads=4, alibi=True, multi_query=False, parallel_attn=False, bias=True),
    ),
    "falcon 11b": Case(
        "FalconForCausalLM",
        "falcon",
        wide(num_kv_heads=2, new_decoder_architecture=True, num_ln_in_parallel_attn=1, activation="gelu_new"),
    ),
    "falcon 40b": Case("FalconForCausalLM", "falcon", wide(num_kv_heads=2, new_decoder_architecture=True)),
}
