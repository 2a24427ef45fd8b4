"""Models of published shapes, whose weights are random: their config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nanoinfer.benchmark.eyes.shapes import EYES

SHAPE_FIELDS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "tie_word_embeddings", "vocab_size",
)  # fmt: skip
QWEN3 = {"model_type": "qwen3", "rope_theta": 1000000.0, "max_position_embeddings": 40960}
QWEN2 = {"model_type": "qwen2", "rope_theta": 1000000.0, "max_position_embeddings": 32768}
QWEN3_VL = {
    "model_type": "qwen3_vl_text", "max_position_embeddings": 262144,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 5000000.0, "mrope_section": [24, 20, 20], "mrope_interleaved": True,
    },
}  # fmt: skip
LLAMA = {"model_type": "llama", "rope_theta": 500000.0, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
LLAMA_ROPE = {
    "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
SMOLLM2 = {**LLAMA, "rope_theta": 130000.0, "max_position_embeddings": 8192}
MISTRAL = {"model_type": "mistral", "max_position_embeddings": 32768, "rms_norm_eps": 1e-5}
PHI = {"model_type": "phi3", "rope_theta": 250000.0, "max_position_embeddings": 16384, "rms_norm_eps": 1e-5}
OLMO = {"model_type": "olmo2", "rope_theta": 500000.0, "max_position_embeddings": 4096}
QWEN3_MOE = {**QWEN3, "model_type": "qwen3_moe", "norm_topk_prob": True}
OLMOE = {"model_type": "olmoe", "rope_theta": 10000.0, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
GEMMA = {
    "model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072,
    "sliding_window": 1024, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256,
    "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "sliding_window": 128,
    "num_experts_per_tok": 4,
}  # fmt: skip
GEMMA4 = {
    "model_type": "gemma4_text", "max_position_embeddings": 131072, "sliding_window": 1024, "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0,
}  # fmt: skip
QWEN3_5 = {
    "model_type": "qwen3_5_text", "max_position_embeddings": 262144, "linear_num_key_heads": 16,
    "mtp_num_hidden_layers": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
}  # fmt: skip
QWEN3_NEXT = {**QWEN3_5, "model_type": "qwen3_next", "linear_num_value_heads": 32, "norm_topk_prob": True}
GLM_MOE = {
    "model_type": "glm4_moe", "attention_bias": True, "norm_topk_prob": True, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "partial_rotary_factor": 0.5,
}  # fmt: skip
MLA = {
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "n_routed_experts": 64, "first_k_dense_replace": 1,
    "rope_theta": 10000.0,
}  # fmt: skip
DEEPSEEK_V2 = {
    **MLA, "model_type": "deepseek_v2", "max_position_embeddings": 163840, "q_lora_rank": None, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "n_shared_experts": 2,
    "topk_method": "greedy", "n_group": 1, "topk_group": 1, "scoring_func": "softmax",
}  # fmt: skip
GLM_LITE = {
    **MLA, "model_type": "glm4_moe_lite", "max_position_embeddings": 202752, "q_lora_rank": 768,
    "qk_nope_head_dim": 192, "v_head_dim": 256, "num_experts_per_tok": 4, "moe_intermediate_size": 1536,
    "n_shared_experts": 1, "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5, "num_nextn_predict_layers": 1,
}  # fmt: skip
NEMOTRON_3 = {
    "model_type": "nemotron_h", "max_position_embeddings": 262144, "layer_norm_epsilon": 1e-5,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "mamba_num_heads": 64,
    "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "routed_scaling_factor": 2.5,
}  # fmt: skip
GRANITE_HYBRID = {
    "model_type": "granitemoehybrid", "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "position_embedding_type": "nope", "embedding_multiplier": 12.0, "attention_multiplier": 0.0078125,
    "residual_multiplier": 0.22, "logits_scaling": 6.0, "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 128,
}  # fmt: skip
FALCON_H1 = {  # whose factors are those of 0.5B
    "model_type": "falcon_h1", "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "rope_theta": 1e11,
    "mamba_n_heads": 24, "mamba_d_head": 128, "mamba_d_state": 256, "mamba_norm_before_gate": False,
    "embedding_multiplier": 5.656854249492381, "lm_head_multiplier": 0.0390625, "key_multiplier": 0.39062499999999994,
    "attention_out_multiplier": 0.9375, "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.23570226039551587,
    "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    "mlp_multipliers": [0.8838834764831844, 0.5859375],
}  # fmt: skip
GPT_NEOX = {"model_type": "gpt_neox", "hidden_act": "gelu", "rotary_pct": 0.25, "max_position_embeddings": 2048}
GPT2 = {"model_type": "gpt2", "max_position_embeddings": 2048}  # twice its own, so that the workloads fit
BERT = {"model_type": "bert", "hidden_act": "gelu", "max_position_embeddings": 512, "pad_token_id": 0}
XLM_R = {
    "model_type": "xlm-roberta", "hidden_act": "gelu", "max_position_embeddings": 8194, "pad_token_id": 1,
    "type_vocab_size": 1,
}  # fmt: skip
SHAPES: dict[str, tuple[tuple[int | bool, ...], dict[str, Any]]] = {
    "tiny": ((64, 128, 2, 4, 2, 32, True, 2048), QWEN3),
    "0.6b": ((1024, 3072, 28, 16, 8, 128, True, 151936), QWEN3),
    "1.7b": ((2048, 6144, 28, 16, 8, 128, True, 151936), QWEN3),
    "4b": ((2560, 9728, 36, 32, 8, 128, True, 151936), QWEN3),
    "8b": ((4096, 12288, 36, 32, 8, 128, False, 151936), QWEN3),
    "14b": ((5120, 17408, 40, 40, 8, 128, False, 151936), QWEN3),
    "32b": ((5120, 25600, 64, 64, 8, 128, False, 151936), QWEN3),
    "30b-a3b": (
        (2048, 6144, 48, 32, 4, 128, False, 151936),
        {**QWEN3_MOE, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    ),
    "llama-1b": ((2048, 8192, 16, 32, 8, 64, True, 128256), {**LLAMA, "rope_scaling": {**LLAMA_ROPE, "factor": 32.0}}),
    "llama-8b": (
        (4096, 14336, 32, 32, 8, 128, False, 128256),
        {**LLAMA, "rope_scaling": {**LLAMA_ROPE, "factor": 8.0}},
    ),
    "qwen2.5-7b": ((3584, 18944, 28, 28, 4, 128, False, 152064), QWEN2),
    "mistral-7b": ((4096, 14336, 32, 32, 8, 128, False, 32000), {**MISTRAL, "rope_theta": 1e4, "sliding_window": 4096}),
    "mistral-24b": (
        (5120, 32768, 40, 32, 8, 128, False, 131072),
        {**MISTRAL, "rope_theta": 1e8, "sliding_window": None},
    ),
    "minilm": ((384, 1536, 6, 12, 12, 32, False, 30522), BERT),
    "bge-m3": ((1024, 4096, 24, 16, 16, 64, False, 250002), XLM_R),
    "gpt2-xl": ((1600, 6400, 48, 25, 25, 64, True, 50257), GPT2),
    "pythia-1.4b": ((2048, 8192, 24, 16, 16, 128, False, 50304), GPT_NEOX),
    "phi4-14b": ((5120, 17920, 40, 40, 10, 128, False, 100352), PHI),
    "gemma3-12b": ((3840, 15360, 48, 16, 8, 256, True, 262208), GEMMA),
    "gemma4-12b": ((3840, 15360, 48, 16, 8, 256, True, 262144), {**GEMMA4, "num_global_key_value_heads": 1}),
    "gemma4-26b-a4b": (
        (2816, 2112, 30, 16, 8, 256, True, 262144),
        {
            **GEMMA4,
            "num_global_key_value_heads": 2,
            "enable_moe_block": True,
            "num_experts": 128,
            "top_k_experts": 8,
            "moe_intermediate_size": 704,
        },
    ),
    "olmoe-7b": (
        (2048, 1024, 16, 16, 16, 128, False, 50304),
        {**OLMOE, "num_experts": 64, "num_experts_per_tok": 8},
    ),
    "gpt-oss-20b": ((2880, 2880, 24, 64, 8, 64, False, 201088), {**GPT_OSS, "num_local_experts": 32}),
    "gpt-oss-20b-mxfp4": (
        (2880, 2880, 24, 64, 8, 64, False, 201088),
        {**GPT_OSS, "num_local_experts": 32, "quantization_config": {"quant_method": "mxfp4"}},
    ),
    "gpt-oss-120b": ((2880, 2880, 36, 64, 8, 64, False, 201088), {**GPT_OSS, "num_local_experts": 128}),
    "qwen3.5-0.8b": ((1024, 3584, 24, 8, 2, 256, True, 248320), {**QWEN3_5, "linear_num_value_heads": 16}),
    "qwen3.5-4b": ((2560, 9216, 32, 16, 4, 256, True, 248320), {**QWEN3_5, "linear_num_value_heads": 32}),
    "qwen3.5-9b": ((4096, 12288, 32, 16, 4, 256, False, 248320), {**QWEN3_5, "linear_num_value_heads": 32}),
    "qwen3.5-27b": ((5120, 17408, 64, 24, 4, 256, False, 248320), {**QWEN3_5, "linear_num_value_heads": 48}),
    "qwen3.5-35b-a3b": (
        (2048, 512, 40, 16, 2, 256, False, 248320),
        {
            **QWEN3_5,
            "model_type": "qwen3_5_moe_text",
            "linear_num_value_heads": 32,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
    ),
    "qwen3-next-80b": (
        (2048, 5120, 48, 16, 2, 256, False, 151936),
        {
            **QWEN3_NEXT,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
    ),
    "granite-4-h-tiny": (
        (1536, 512, 40, 12, 4, 128, True, 100352),
        {
            **GRANITE_HYBRID,
            "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
            "num_local_experts": 64,
            "num_experts_per_tok": 6,
            "shared_intermediate_size": 1024,
        },
    ),
    "falcon-h1-7b": ((3072, 12288, 44, 12, 2, 128, False, 130048), {**FALCON_H1, "mamba_d_ssm": 3072}),
    "glm-4.5-air": (
        (4096, 10944, 46, 96, 8, 128, False, 151552),
        {
            **GLM_MOE,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "deepseek-v2-lite": ((2048, 10944, 27, 16, 16, 64, False, 102400), DEEPSEEK_V2),
    "glm-4.7-flash": ((2048, 10240, 47, 20, 20, 64, False, 154880), GLM_LITE),
    "nemotron-3-nano": (
        (2688, 1856, 52, 32, 2, 128, False, 131072),
        {
            **NEMOTRON_3,
            "n_routed_experts": 128,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712,
        },
    ),
    "olmo2-7b": ((4096, 11008, 32, 32, 32, 128, False, 100352), OLMO),
    "tiny-vl": ((64, 128, 2, 1, 1, 128, True, 151936), QWEN3_VL),
    "qwen3-vl-2b": ((2048, 6144, 28, 16, 8, 128, True, 151936), QWEN3_VL),
    "qwen3-vl-8b": ((4096, 12288, 36, 32, 8, 128, False, 151936), QWEN3_VL),
    "internvl3-8b": ((3584, 18944, 28, 28, 4, 128, False, 151674), QWEN2),
    "smolvlm-2b": ((2048, 8192, 24, 32, 32, 64, False, 49280), SMOLLM2),
}  # published shapes, but for the tiny ones
ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM", "phi3": "Phi3ForCausalLM", "gpt2": "GPT2LMHeadModel", "bert": "BertModel",
    "xlm-roberta": "XLMRobertaModel",
    "gpt_neox": "GPTNeoXForCausalLM", "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "olmo2": "Olmo2ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "olmoe": "OlmoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM", "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM", "falcon_h1": "FalconH1ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM", "glm4_moe": "Glm4MoeForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM", "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
}  # fmt: skip
EXPERTS = "num_experts", "num_local_experts", "n_routed_experts"  # what config.json calls their number
STACKED = "gemma4_text", "granitemoehybrid", "qwen3_5_moe_text"  # whose plain checkpoints have experts in two tensors


def has_experts(name: str) -> bool:
    """Return whether a published shape has experts."""
    return any(field in SHAPES[name][1] for field in EXPERTS)


def has_stacks(name: str) -> bool:
    """Return whether checkpoints of a published shape, if plain, have the experts of a layer in two tensors."""
    return SHAPES[name][1]["model_type"] in STACKED


def write_config(name: str, folder: str) -> None:
    """Write the config.json of a published shape, and of one that sees what processes images."""
    shape, family = SHAPES[name]
    config = {
        "architectures": [ARCHITECTURES.get(family["model_type"])],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "torch_dtype": "bfloat16",
        "pad_token_id": None,
        **family,
        **dict(zip(SHAPE_FIELDS, shape, strict=True)),
    }
    if (eyes := EYES.get(name)) is not None:
        eyes.write_processor(folder)
        config = eyes.around(config)
    (Path(folder) / "config.json").write_text(json.dumps(config), "utf-8")
