"""Cases of multimodal checkpoints, which are run as text only."""

from __future__ import annotations

from cases.case import YARN, Case
from cases.gemma4 import GEMMA4_EXPERTS, GEMMA4_SMALL, GEMMA4_UNIFIED, INPUTS, KINDS, SHARED
from cases.latent import LATENT
from cases.sparse import EXPERTS
from cases.states import DELTA, DELTA_MOE
from cases.states import KINDS as CONVOLUTIONS

VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
QWEN2_VISION = {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 64}
QWEN3_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 48,
    "deepstack_visual_indexes": [0],
}
QWEN3_5_VISION = {name: size for name, size in QWEN3_VISION.items() if name != "deepstack_visual_indexes"}

INTERN_VISION = {**VISION, "image_size": [56, 56], "patch_size": [14, 14]}
EXAONE_VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "out_hidden_size": 48,
    "fullatt_block_indexes": [1],
    "window_size": 56,
}
DOCLING_VISION = {
    **VISION,
    "num_hidden_layers": 2,
    "image_size": 56,
    "patch_size": 14,
    "scale_factor": 2,
    "out_hidden_size": 48,
    "deepstack_visual_indexes": [0, 1],
}
LFM2_VISION = {**VISION, "num_patches": 16, "patch_size": 14, "vision_use_head": False}
ONEVISION_VISION = {**VISION, "image_size": 56, "patch_size": 14, "vision_use_head": False}
MINICPM_VISION = {**VISION, "num_hidden_layers": 2, "image_size": 112, "patch_size": 14}
GLM_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 48,
    "image_size": 56,
    "patch_size": 14,
}
GLM_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 1]}
APERTUS_VISION = {"codebook_size": 10, "embed_dim": 4, "latent_channels": 4, "base_channels": 32}
EARS = {
    "num_mel_bins": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "d_model": 32,
    "max_source_positions": 50,  # a second
}
APERTUS_SOUND = {
    "model_type": "wavtokenizer_encoder",
    "num_filters": 2,
    "num_lstm_layers": 1,
    "hidden_size": 8,
    "codebook_size": 10,
    "codebook_dim": 8,
}
MUSE_PROJECTOR = {"out_hidden_size": 128, "projector_hidden_size": 32}

MULTIMODAL = {
    "gemma3 multimodal": Case(
        "Gemma3ForConditionalGeneration",
        "gemma3",
        {"sliding_window": 24},
        {**VISION, "image_size": 28, "patch_size": 14},
    ),
    "gemma4 multimodal, layer inputs": Case(
        "Gemma4ForConditionalGeneration",
        "gemma4",
        {**KINDS, **INPUTS, **SHARED, "pad_token_id": 3},
        {**VISION, "head_dim": 16, "num_key_value_heads": 2, "position_embedding_size": 64},
    ),
    "gemma4 multimodal, experts": Case(
        "Gemma4ForConditionalGeneration",
        "gemma4",
        {
            **GEMMA4_SMALL,
            **GEMMA4_EXPERTS,
            "final_logit_softcapping": 30.0,
            "pad_token_id": 0,
            "use_bidirectional_attention": "vision",
        },
        {**VISION, "head_dim": 16, "num_key_value_heads": 2, "position_embedding_size": 64},
    ),
    "gemma4unified multimodal": Case(
        "Gemma4UnifiedForConditionalGeneration",
        "gemma4_unified",
        {**GEMMA4_UNIFIED, "final_logit_softcapping": 30.0, "pad_token_id": 0},
        {"patch_size": 4, "mm_embed_dim": 48, "mm_posemb_size": 16, "output_proj_dims": 48},
    ),
    "ministral3 multimodal": Case(
        "Mistral3ForConditionalGeneration",
        "mistral3",
        {"model_type": "ministral3", "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}},
        {**VISION, "head_dim": 16, "image_size": 28, "patch_size": 14},
    ),
    "mistral3 multimodal, latents": Case(
        "Mistral3ForConditionalGeneration",
        "mistral3",
        {"model_type": "mistral4", **LATENT["mistral4"].settings, "tie_word_embeddings": False},
        {**VISION, "head_dim": 16, "image_size": 28, "patch_size": 14},
    ),
    "glm4v": Case(
        "Glm4vForConditionalGeneration",
        "glm4v",
        {"rope_parameters": GLM_ROPE, "head_dim": 12, "tie_word_embeddings": False},
        GLM_VISION,
    ),
    "glm46v": Case(
        "Glm46VForConditionalGeneration",
        "glm46v",
        {"rope_parameters": GLM_ROPE, "head_dim": 12, "tie_word_embeddings": False},
        GLM_VISION,
    ),
    "glm4v-moe": Case(
        "Glm4vMoeForConditionalGeneration",
        "glm4v_moe",
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "rope_parameters": {**GLM_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
            "tie_word_embeddings": False,
        },
        GLM_VISION,
    ),
    "paddleocr-vl": Case(
        "PaddleOCRVLForConditionalGeneration",
        "paddleocr_vl",
        {"rope_parameters": MROPE, "use_bias": True},
        {**VISION, "image_size": 56, "patch_size": 14},
    ),
    "internvl3.5": Case(
        "InternVLForConditionalGeneration",
        "internvl",
        {"model_type": "qwen3", "tie_word_embeddings": False},
        INTERN_VISION,
        outer={"image_seq_length": 4},
    ),
    "internvl": Case(
        "InternVLForConditionalGeneration",
        "internvl",
        {"model_type": "qwen2", "tie_word_embeddings": True},
        INTERN_VISION,
        outer={"image_seq_length": 4},
    ),
    "exaone4.5": Case(
        "Exaone4_5_ForConditionalGeneration",
        "exaone4_5",
        {
            "model_type": "exaone4",
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "tie_word_embeddings": False,
        },
        EXAONE_VISION,
    ),
    "idefics3": Case(
        "Idefics3ForConditionalGeneration",
        "idefics3",
        {"model_type": "llama"},
        {**VISION, "image_size": 56, "patch_size": 14},
        outer={"scale_factor": 2, "tie_word_embeddings": True},
    ),
    "granite-docling": Case(
        "GraniteDoclingForConditionalGeneration",
        "granite_docling",
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 0.5,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.2,
        },
        DOCLING_VISION,
        outer={"tie_word_embeddings": False, "density_router_hidden_size": 8},
    ),
    "lfm2-vl": Case(
        "Lfm2VlForConditionalGeneration",
        "lfm2_vl",
        {"model_type": "lfm2", **CONVOLUTIONS, "tie_word_embeddings": True},
        LFM2_VISION,
        keeps_states=True,
        outer={"projector_hidden_size": 32},
    ),
    "llava-onevision": Case(
        "LlavaOnevisionForConditionalGeneration",
        "llava_onevision",
        {"model_type": "qwen2", "tie_word_embeddings": True},
        ONEVISION_VISION,
        outer={"image_grid_pinpoints": [[56, 56], [56, 112], [112, 56], [112, 112]]},
    ),
    "minicpm-v4.6": Case(
        "MiniCPMV4_6ForConditionalGeneration",
        "minicpmv4_6",
        {"model_type": "qwen3_5_text", **DELTA, "tie_word_embeddings": True},
        MINICPM_VISION,
        keeps_states=True,
        outer={"insert_layer_id": 0},
    ),
    "smolvlm": Case(
        "SmolVLMForConditionalGeneration",
        "smolvlm",
        {"model_type": "llama"},
        {**VISION, "image_size": 56, "patch_size": 14},
        outer={"scale_factor": 2, "tie_word_embeddings": False},
    ),
    "kimi-k2.5 multimodal": Case(
        "Kimi_K25ForConditionalGeneration",
        "kimi_k25",
        {"model_type": "deepseek_v3", **LATENT["deepseek-v3"].settings, "tie_word_embeddings": False},
        {**VISION, "pos_emb_height": 4, "pos_emb_width": 4},
        outer={"projection_hidden_size": 32},
    ),
    "mistral3 multimodal": Case(
        "Mistral3ForConditionalGeneration",
        "mistral3",
        {"model_type": "mistral", "sliding_window": None, "tie_word_embeddings": False},
        {**VISION, "head_dim": 16, "image_size": 28, "patch_size": 14},
    ),
    "qwen2-audio": Case(
        "Qwen2AudioForConditionalGeneration",
        "qwen2_audio",
        {"model_type": "qwen2", "hidden_size": 64, "tie_word_embeddings": False},
        {},
        outer={"audio_config": {"model_type": "qwen2_audio_encoder", **EARS}},
    ),
    "qwen2-vl windows": Case(
        "Qwen2VLForConditionalGeneration",
        "qwen2_vl",
        {
            "hidden_size": 64,
            "rope_parameters": MROPE,
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 2,
            "tie_word_embeddings": True,
        },
        QWEN2_VISION,
    ),
    "qwen2-vl": Case(
        "Qwen2VLForConditionalGeneration",
        "qwen2_vl",
        {
            "hidden_size": 64,
            "rope_parameters": MROPE,
        },
        QWEN2_VISION,
    ),
    "qwen2.5-vl": Case(
        "Qwen2_5_VLForConditionalGeneration",
        "qwen2_5_vl",
        {
            "hidden_size": 64,
            "rope_parameters": MROPE,
        },
        {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64},
    ),
    "qwen3-vl": Case(
        "Qwen3VLForConditionalGeneration",
        "qwen3_vl",
        {"rope_parameters": MROPE},
        QWEN3_VISION,
    ),
    "qwen3-vl-moe": Case(
        "Qwen3VLMoeForConditionalGeneration",
        "qwen3_vl_moe",
        {**EXPERTS, "rope_parameters": MROPE},
        QWEN3_VISION,
    ),
    "qwen3-vl-moe biases, some layers": Case(
        "Qwen3VLMoeForConditionalGeneration",
        "qwen3_vl_moe",
        {
            **EXPERTS,
            "attention_bias": True,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "rope_parameters": MROPE,
        },
        QWEN3_VISION,
    ),
    "qwen3.5 multimodal": Case("Qwen3_5ForConditionalGeneration", "qwen3_5", DELTA, QWEN3_5_VISION, keeps_states=True),
    "qwen3.5moe multimodal": Case(
        "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", DELTA_MOE, QWEN3_5_VISION, keeps_states=True
    ),
    "apertus1.5 multimodal": Case(
        "Apertus1p5ForConditionalGeneration",
        "apertus1p5",
        {"vocab_size": 200, "output_vocab_size": 160, "pad_token_id": 3},
        APERTUS_VISION,
        outer={"audio_config": APERTUS_SOUND, "image_token_offset": 165, "audio_token_offset": 175},
    ),
    "muse-glimmer other windows and rotations": Case(
        "MuseGlimmerForConditionalGeneration",
        "muse_glimmer",
        {
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "layer_rope_theta": [0, 500.0, 0, 0],
            "qk_scale_factor": 2.0,
            "post_norm_eps": 0.05,
            "rms_norm_eps": 0.02,
        },
        {**VISION, "patch_size": 14},
        outer=MUSE_PROJECTOR,
    ),
    "muse-glimmer": Case(
        "MuseGlimmerForConditionalGeneration",
        "muse_glimmer",
        {"sliding_window": 24, "output_multiplier": 0.7, "final_logit_softcapping": 3.0},
        {**VISION, "patch_size": 14},
        outer=MUSE_PROJECTOR,
    ),
}
