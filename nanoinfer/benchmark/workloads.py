"""Workloads of bench.py: requests of random tokens, and models of published shapes with random weights."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoinfer.benchmark.eyes.eyes import SIDE, Eyes, draw_images
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
MAX_TOKEN = 10000  # the largest random token id in prompts, if the vocabulary has it


@dataclass(frozen=True)
class Recipe:
    """The recipe of a workload, and the engine's limits that suit it; lengths are (least, most) tokens."""

    num_seqs: int = 256
    prompt_lens: tuple[int, int] = (100, 1024)
    output_lens: tuple[int, int] = (100, 1024)
    prefix_len: int = 0  # tokens that come before every prompt, the same for all
    images: int = 0  # so many different ones come before the prompts, in turn
    samples: int = 1  # of each prompt
    mean_output: int | None = (
        None  # outputs have geometric lengths of this mean, at most output_lens; None: output_lens
    )
    repeat_rate: float | None = None  # at which guesses of the next token hold, with random weights; None: by chance
    max_num_seqs: int = 512
    max_model_len: int = 4096
    kv_tokens: int | None = None  # the KV cache has the fewest blocks that hold so many; None: what the memory holds

    def draw(self, vocab_size: int, eyes: Eyes | None = None) -> Workload:
        """Draw prompts and output lengths from seed 0, in nano-vLLM's order; the shared prefix is drawn last.

        Images are drawn for each repeat.
        eyes: of the model, if the workload has images
        """
        rand = random.Random(0).randint
        top = min(MAX_TOKEN, vocab_size - 1)
        prompts = [[rand(0, top) for _ in range(rand(*self.prompt_lens))] for _ in range(self.num_seqs)]
        output_lens = [rand(*self.output_lens) for _ in range(self.num_seqs)]
        prefix = [rand(0, top) for _ in range(self.prefix_len)]
        images = min(self.images, self.num_seqs)
        if images:
            assert eyes is not None
            prefix = eyes.seen
        shared = len(prefix) if images < self.num_seqs else 0
        prompts = [prefix + prompt for prompt in prompts]
        stop_ids = [] if self.mean_output is None else draw_stop_ids(self.mean_output, vocab_size)
        return Workload(prompts, output_lens, shared, self.samples, max(1, images), images, eyes, stop_ids)

    def __str__(self) -> str:
        prompt, output = ("-".join(map(str, sorted(set(lens)))) for lens in (self.prompt_lens, self.output_lens))
        prefix = f"{self.prefix_len} + " if self.prefix_len else ""
        prefix += f"one of {self.images} images of {SIDE} x {SIDE} + " if self.images else ""
        if self.mean_output is not None:
            output = f"{self.mean_output} on average (at most {output})"
        samples = f", {self.samples} samples" if self.samples > 1 else ""
        samples += f", guesses hold at rate {self.repeat_rate}" if self.repeat_rate is not None else ""
        cache = f", {self.kv_tokens:,} in the KV cache" if self.kv_tokens else ""
        return f"{prefix}{prompt} in, {'embedded' if self.only_reads else f'{output} out'}{samples}{cache}"

    @property
    def only_reads(self) -> bool:
        """Whether texts are embedded, and get no token."""
        return self.output_lens == (0, 0)

    def num_blocks(self, block_size: int) -> int | None:
        """Return how many blocks of so many tokens the KV cache has; None: as many as the memory holds."""
        return None if self.kv_tokens is None else -(-self.kv_tokens // block_size)


WORKLOADS = {
    "nano": Recipe(),  # nano-vLLM's own
    "refill": Recipe(num_seqs=1024, max_num_seqs=256),  # waiting requests fill the rows of those that end
    "tight": Recipe(kv_tokens=110_000),  # what 30b-a3b leaves of 80 GB
    "stream": Recipe(num_seqs=1, prompt_lens=(128, 128), output_lens=(512, 512)),
    "prefix": Recipe(prefix_len=1024),
    "samples": Recipe(num_seqs=32, prompt_lens=(1024, 1024), output_lens=(512, 512), samples=16),
    "window": Recipe(num_seqs=16, prompt_lens=(16384, 16384), output_lens=(256, 256), max_model_len=16640),
    "long": Recipe(num_seqs=8, prompt_lens=(32768, 32768), output_lens=(256, 256), max_model_len=33024),
    "embed": Recipe(num_seqs=10_000, prompt_lens=(200, 200), output_lens=(0, 0)),
    "images": Recipe(prompt_lens=(64, 64), output_lens=(128, 128), images=256),
    "same-images": Recipe(prompt_lens=(64, 64), output_lens=(128, 128), images=16),
    "repeat": Recipe(num_seqs=1, prompt_lens=(128, 128), output_lens=(512, 512), repeat_rate=0.7),
    "rollouts": Recipe(
        num_seqs=32,
        prompt_lens=(512, 512),
        output_lens=(4096, 4096),
        mean_output=512,
        samples=16,
        repeat_rate=0.7,
        max_model_len=4608,
    ),
}


@dataclass
class Workload:
    """Prompts, and how many tokens to generate for each sample; 0: they are embedded.

    prompts: their tokens, in which an image has all of its placeholders
    prefix_len: so many first tokens they share, with those of `prefixes` that have the same; in turn
    samples: of each prompt
    images: how many come before the prompts, in turn; eyes: of the model that sees them
    stop_ids: tokens that end a sample
    """

    prompts: list[list[int]]
    output_lens: list[int]
    prefix_len: int = 0
    samples: int = 1
    prefixes: int = 1
    images: int = 0
    eyes: Eyes | None = None
    stop_ids: list[int] = field(default_factory=list)

    def repeat(self, index: int, vocab_size: int) -> list[Any]:
        """Return the prompts as generate takes them.

        Each repeat has other tokens, and other images, so that none finds the last one's prefixes cached.
        """
        top = min(MAX_TOKEN, vocab_size - 1) + 1
        if not self.images:
            return [[(token + index) % top for token in prompt] for prompt in self.prompts]
        assert self.eyes is not None
        images, given, length = draw_images(self.images, index), self.eyes.given, len(self.eyes.seen)
        texts = [[(token + index) % top for token in prompt[length:]] for prompt in self.prompts]
        return [
            {"prompt_token_ids": given + text, "multi_modal_data": {"image": [images[number % self.images]]}}
            for number, text in enumerate(texts)
        ]

    def as_it_ended(self, output_lens: list[int]) -> Workload:
        """Return the workload of a repeat whose samples had these lengths, those of a prompt one after another.

        Each sample is a request then, which shares its prompt.
        """
        if not self.stop_ids:
            return self
        count, length = len(self.prompts), len(self.prompts[0])
        turns = [output_lens[start :: self.samples] for start in range(self.samples)]
        return Workload(self.prompts * self.samples, [out for turn in turns for out in turn], length, prefixes=count)

    @property
    def tokens_in(self) -> int:
        """Prompt tokens of one repeat."""
        return sum(map(len, self.prompts))

    @property
    def tokens_out(self) -> int:
        """Generated tokens of one repeat."""
        return self.samples * sum(self.output_lens)


def draw_stop_ids(mean: int, vocab_size: int) -> list[int]:
    """Return so many token ids that a text of random tokens ends after so many on average."""
    return random.Random(0).sample(range(vocab_size), max(1, round(vocab_size / mean)))


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
