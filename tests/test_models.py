"""Compares every family with transformers: random float32 weights, greedy tokens and log-probabilities everywhere."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import greedy, whole_only
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from nanoinfer import LLM, RequestOutput
from nanoinfer.config import Config
from nanoinfer.layers.delta import GatedDelta
from nanoinfer.layers.linear import RowParallelLinear
from nanoinfer.models import FAMILIES, describe, families

LENGTHS = [1, 2, 15, 16, 17, 40, 100, 300]  # of the prompts, in one batch
MAX_TOKENS = 6
VOCAB = 160
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2],
    "long_factor": [1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0],
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


@dataclass
class Case:
    """A class that config.json may name, with the model_type and the settings to try."""

    architecture: str
    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] | None = None  # of a multimodal checkpoint, whose text_config has the settings


CASES = {  # of several cases of a class, the last runs on two ranks too
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
    "mistral": Case("MistralForCausalLM", "mistral", {"sliding_window": None}),
    "mistral window": Case("MistralForCausalLM", "mistral", {"sliding_window": 24}),
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
    "phi3 longrope": Case(
        "Phi3ForCausalLM",
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 42, "hidden_size": 64},
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
    "glm4 without biases": Case(
        "Glm4ForCausalLM",
        "glm4",
        {
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        },
    ),
    "glm4": Case("Glm4ForCausalLM", "glm4"),
    "mixtral": Case("MixtralForCausalLM", "mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral window": Case("MixtralForCausalLM", "mixtral", {"num_local_experts": 4, "sliding_window": 24}),
    "olmoe": Case("OlmoeForCausalLM", "olmoe", {**EXPERTS, "hidden_size": 64}),
    "olmoe biases": Case(
        "OlmoeForCausalLM",
        "olmoe",
        {**EXPERTS, "hidden_size": 64, "attention_bias": True, "norm_topk_prob": True, "num_experts_per_tok": 1},
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
    "gemma3 multimodal": Case(
        "Gemma3ForConditionalGeneration",
        "gemma3",
        {"sliding_window": 24},
        {**VISION, "image_size": 28, "patch_size": 14},
    ),
    "ministral3 multimodal": Case(
        "Mistral3ForConditionalGeneration",
        "mistral3",
        {"model_type": "ministral3", "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}},
        {**VISION, "head_dim": 16, "image_size": 28, "patch_size": 14},
    ),
    "mistral3 multimodal": Case(
        "Mistral3ForConditionalGeneration",
        "mistral3",
        {"model_type": "mistral", "sliding_window": None, "tie_word_embeddings": False},
        {**VISION, "head_dim": 16, "image_size": 28, "patch_size": 14},
    ),
    "qwen2.5-vl": Case(
        "Qwen2_5_VLForConditionalGeneration",
        "qwen2_5_vl",
        {
            "hidden_size": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        },
        {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64},
    ),
    "qwen3-vl": Case(
        "Qwen3VLForConditionalGeneration",
        "qwen3_vl",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
        {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 48,
            "deepstack_visual_indexes": [0],
        },
    ),
}


def build(case: Case, folder: Path) -> PreTrainedModel:
    """Save a checkpoint of random weights, norms and biases included; returns transformers' model of it."""
    torch.manual_seed(0)
    settings = {**SHAPE, **case.settings}
    if case.architecture == "Qwen2_5_VLForConditionalGeneration":
        settings.pop("head_dim")  # transformers computes it from the hidden size
    if case.vision is not None:
        tied = {"tie_word_embeddings": settings.pop("tie_word_embeddings")} if "tie_word_embeddings" in settings else {}
        settings = {"text_config": settings, "vision_config": case.vision, **tied}
    config = AutoConfig.for_model(case.model_type, **settings)
    auto = AutoModelForCausalLM if case.vision is None else AutoModelForImageTextToText
    model = auto.from_config(config, attn_implementation="eager").float().eval()
    assert type(model).__name__ == case.architecture
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            low, high = (0.5, 1.5) if parameter.min() == 1 else (-0.3, 0.3)  # a norm; else Gemma's norm, or a bias
            torch.nn.init.uniform_(parameter, low, high)
        elif "visual" not in name and "vision" not in name:
            torch.nn.init.normal_(parameter, std=1.4 / parameter.shape[1] ** 0.5)
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
def logprobs(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Return log-probabilities after each token, [tokens, vocabulary]."""
    return model(input_ids=torch.tensor([tokens])).logits[0].float().log_softmax(dim=-1)


def check(output: RequestOutput, prompt: list[int], model: PreTrainedModel, length_matters: bool) -> None:
    """Check that each token is the likeliest after the tokens before it, and log-probabilities equal transformers'."""
    tokens = output["token_ids"]
    assert len(tokens) == MAX_TOKENS
    if output["prompt_logprobs"] is not None:
        ours = [entry[token] for entry, token in zip(output["prompt_logprobs"][1:], prompt[1:], strict=True)]
        theirs = logprobs(model, prompt)[range(len(prompt) - 1), prompt[1:]].tolist()
        assert ours == pytest.approx(theirs, abs=1e-4)
    if length_matters:  # a longer sequence has other frequencies, and so other logits at all positions
        rows = torch.stack([logprobs(model, prompt + tokens[:i])[-1] for i in range(MAX_TOKENS)])
    else:
        rows = logprobs(model, prompt + tokens[:-1])[len(prompt) - 1 :]
    assert tokens == rows.argmax(dim=-1).tolist()
    ours = [entry[token] for entry, token in zip(output["logprobs"], tokens, strict=True)]
    assert ours == pytest.approx(rows[range(MAX_TOKENS), tokens].tolist(), abs=1e-4)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, PreTrainedModel]]:
    """Return a function that makes a case's folder and transformers' model, once each."""

    @functools.cache
    def make(name: str) -> tuple[str, PreTrainedModel]:
        folder = tmp_path_factory.mktemp("family")
        return str(folder), build(CASES[name], folder)

    return make


def run(llm: LLM, model: PreTrainedModel, prompt_logprobs: int | None = None) -> None:
    params = greedy(MAX_TOKENS, ignore_eos=True, logprobs=0, prompt_logprobs=prompt_logprobs)
    outputs = llm.generate(prompts(), params, use_tqdm=False)
    length_matters = llm.config.description.long_from is not None
    for output, prompt in zip(outputs, prompts(), strict=True):
        check(output, prompt, model, length_matters)


LAST_OF_CLASSES = list({case.architecture: name for name, case in CASES.items()}.values())
OF_KINDS = ["gemma2 low caps", "olmo2 biases", "qwen2moe without biases", "phi3 longrope"]  # norms, experts, one matrix


@pytest.mark.parametrize("name", [*LAST_OF_CLASSES, *whole_only(name for name in CASES if name not in LAST_OF_CLASSES)])
def test_a_family_equals_transformers(
    name: str, family: Callable[[str], tuple[str, PreTrainedModel]], make_llm: Callable[..., LLM]
) -> None:
    """Prompts are fresh, then prefix-cached, then in chunks in a cache so small that sequences are preempted."""
    folder, model = family(name)
    llm = make_llm(folder, kvcache_block_size=16, max_model_len=320)
    run(llm, model, prompt_logprobs=0)
    run(llm, model)
    tight = make_llm(folder, kvcache_block_size=16, max_model_len=320, num_kvcache_blocks=21, max_num_batched_tokens=50)
    run(tight, model)


@pytest.mark.parametrize("name", [*whole_only(["qwen3"]), "qwen2moe"])
def test_an_activation_that_the_second_product_applies(
    name: str,
    family: Callable[[str], tuple[str, PreTrainedModel]],
    make_llm: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So it is on a GPU in FP8, for several tokens: the launch that rounds them applies it."""
    monkeypatch.setattr(RowParallelLinear, "can_apply_activation", lambda self, tokens: tokens > 1)
    folder, model = family(name)
    run(make_llm(folder, kvcache_block_size=16, max_model_len=320), model)


@pytest.mark.parametrize("name", [*OF_KINDS, *whole_only(name for name in LAST_OF_CLASSES if name not in OF_KINDS)])
def test_two_ranks(
    name: str, family: Callable[[str], tuple[str, PreTrainedModel]], make_llm: Callable[..., LLM]
) -> None:
    folder, model = family(name)
    llm = make_llm(folder, device="cpu", tensor_parallel_size=2, kvcache_block_size=16, max_model_len=320)
    run(llm, model, prompt_logprobs=0)


@pytest.mark.multi_gpu
@pytest.mark.parametrize(
    "name",
    ["llama biases, llama3 rope", "gemma2", "gemma3", "olmo2 biases", "granite", "glm4", "qwen2moe", "qwen3moe"],
)
def test_two_gpus(
    name: str, family: Callable[[str], tuple[str, PreTrainedModel]], make_llm: Callable[..., LLM]
) -> None:
    """Models with norms after branches, biases or experts take another way through the sums over ranks."""
    folder, model = family(name)
    run(make_llm(folder, tensor_parallel_size=2, kvcache_block_size=16, max_model_len=320), model, prompt_logprobs=0)


def test_more_ranks_than_kv_heads(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """Both ranks hold the only key head, and the norm over all heads must count its numbers once."""
    model = build(Case("Olmo2ForCausalLM", "olmo2", {"num_key_value_heads": 1}), tmp_path)
    llm = make_llm(str(tmp_path), device="cpu", tensor_parallel_size=2, kvcache_block_size=16, max_model_len=320)
    run(llm, model, prompt_logprobs=0)


MULTIMODAL = [name for name, case in CASES.items() if case.vision is not None]


@pytest.mark.parametrize("name", [MULTIMODAL[0], *whole_only(MULTIMODAL[1:])])
def test_the_other_order_of_a_multimodal_checkpoints_names(
    name: str, make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    """Older names have "language_model.model.", newer "model.language_model."; Qwen2.5-VL's first had neither."""
    model = build(CASES[name], tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    is_old = not any(key.startswith("model.language_model.") for key in weights)

    def renamed(key: str) -> str:
        if "vision_tower" in key or "visual" in key or "projector" in key:
            return f"model.{key}" if is_old else key.removeprefix("model.")
        if is_old:
            key = key.removeprefix("language_model.")
            return key if key.startswith("lm_head") else key.replace("model.", "model.language_model.", 1)
        return key.replace("model.language_model.", "language_model.model.", 1)

    save_file({renamed(key): weight for key, weight in weights.items()}, file, {"format": "pt"})
    assert not set(load_file(file)) & set(weights) - {"lm_head.weight"}
    run(make_llm(str(tmp_path), kvcache_block_size=16, max_model_len=320), model)


def test_a_mistral_with_layer_types_has_windows_on_those_alone(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """Ministral 8B has layer_types. transformers gives the model another model_type than its config.json."""
    kinds = ["sliding_attention", "full_attention"] * 2
    model = build(Case("MinistralForCausalLM", "ministral", {"sliding_window": 24, "layer_types": kinds}), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    names = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    (tmp_path / "config.json").write_text(json.dumps({**config, **names}))
    run(make_llm(str(tmp_path), kvcache_block_size=16, max_model_len=320), model, prompt_logprobs=0)


def test_windows_that_qwen3_vl_does_not_have() -> None:
    text = {**SHAPE, "sliding_window": 24, "layer_types": ["sliding_attention"] * 4}
    name = "Qwen3VLForConditionalGeneration"
    with pytest.raises(ValueError, match="layer_types='sliding_attention' in its config is not supported"):
        describe(AutoConfig.for_model("qwen3_vl", text_config=text, architectures=[name]))


def test_a_multimodal_checkpoint_says_that_it_is_run_as_text_only(
    family: Callable[[str], tuple[str, PreTrainedModel]],
    make_llm: Callable[..., LLM],
    caplog: pytest.LogCaptureFixture,
) -> None:
    make_llm(family("gemma3 multimodal")[0], max_model_len=64)
    (warning,) = [record for record in caplog.records if record.name == "nanoinfer"]
    assert "images are not supported" in warning.getMessage()


def test_what_only_longer_sequences_would_see_costs_nothing(
    family: Callable[[str], tuple[str, PreTrainedModel]],
) -> None:
    """One model has a window of 50 tokens, the other has long_frequencies beyond 42 tokens."""
    for name, longest in (("ministral3 window", 50), ("phi3 longrope", 42)):
        folder = family(name)[0]
        short, long = (Config(folder, max_model_len=length).description for length in (longest, longest + 1))
        assert (set(short.windows), short.long_from) == ({None}, None)
        assert (set(long.windows), long.long_from) != ({None}, None)


@pytest.mark.parametrize(
    ("windows", "delta", "experts", "layers"),
    [
        ([None], None, None, [0]),
        ([None] * 4, None, None, [0, 1]),
        ([8, None, 8, None], None, None, [0, 1, 2]),
        ([8, 8, None, 8], None, None, [0, 1, 2]),
        ([None] * 4, None, [False, False, True, True], [0, 1, 2]),
        ([8, 8, None, 8], None, [False, True, True, False], [0, 1, 2, 3]),
        ([None] * 5, [0, 1, 2, 4], None, [0, 1, 3]),
        ([None] * 5, [0, 1, 2, 4], [False, False, True, True, True], [0, 1, 2, 3]),
    ],
)
def test_the_different_layers_are_the_first_and_the_first_of_each_kind_of_the_others(
    windows: list[int | None],
    delta: list[int] | None,
    experts: list[bool] | None,
    layers: list[int],
    family: Callable[[str], tuple[str, PreTrainedModel]],
) -> None:
    """delta: the layers that have the gated delta rule, and no attention"""
    model = Config(family("qwen3moe")[0], device="cpu").description
    made = None if experts is None else replace(model.experts, layers=tuple(experts))
    ropes = model.ropes[:1] * len(windows)
    mixers = tuple(GatedDelta(2, 2, 16, 16, 4) if layer in (delta or ()) else None for layer in range(len(windows)))
    changed = replace(model, num_layers=len(windows), windows=tuple(windows), ropes=ropes, mixers=mixers, experts=made)
    assert changed.different_layers == layers


def test_the_different_layers_run_alone(
    family: Callable[[str], tuple[str, PreTrainedModel]], make_llm: Callable[..., LLM]
) -> None:
    folder, model = family("gemma3")
    llm = make_llm(folder)
    decoder, ran = llm.engine.ranks.runner.holdings.model, []
    for number, layer in enumerate(decoder.layers):
        layer.register_forward_pre_hook(lambda *_, number=number: ran.append(number))
    with decoder.one_of_each():
        llm.generate([[1, 2]], greedy(2), use_tqdm=False)
    assert ran == 2 * decoder.different_layers != 2 * list(range(decoder.num_layers))
    with pytest.raises(KeyboardInterrupt), decoder.one_of_each():
        raise KeyboardInterrupt
    run(llm, model)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"num_attention_heads": -4}, "num_attention_heads=-4 .*must be an integer of at least 1"),
        ("llama", {"head_dim": 0}, "head_dim=0 .*must be an integer of at least 1"),
        ("llama", {"head_dim": 5}, "head_dim=5 .*must be even"),
        ("llama", {"num_key_value_heads": 0}, "num_key_value_heads=0 .*must be an integer of at least 1"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads=3 .*must be a divisor of num_attention_heads=4"),
        ("llama", {"max_position_embeddings": -5}, "max_position_embeddings=-5 .*must be an integer"),
        ("llama", {"rope_parameters": {**LINEAR, "rope_theta": None}}, "rope_theta=None .*must be a number above 0"),
        ("llama", {"rope_parameters": {**LINEAR, "rope_theta": 0}}, "rope_theta=0 .*must be a number above 0"),
        ("llama", {"rope_parameters": {**LINEAR, "factor": 0}}, "factor=0 .*must be a number above 0"),
        ("llama", {"rope_parameters": {**LINEAR, "factor": "x"}}, "factor='x' .*must be a number above 0"),
        ("llama", {"rope_parameters": {**LLAMA3, "low_freq_factor": 0}}, "low_freq_factor=0 .*must be a number"),
        ("llama", {"rope_parameters": {**LLAMA3, "low_freq_factor": 9}}, "must be less than high_freq_factor=4.0"),
        ("llama", {"rope_parameters": {**YARN, "factor": 0}}, "factor=0 .*must be a number above 0"),
        ("llama", {"rope_parameters": {**YARN, "rope_theta": 1}}, "rope_theta=1 .*must be above 1"),
        ("llama", {"rope_parameters": {**LINEAR, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5 .*not sup"),
        ("phi3 longrope", {"original_max_position_embeddings": 1}, "original_max_position_embeddings=1 .*above 1"),
        ("phi3 longrope", {"rope_parameters": {**LONGROPE, "long_factor": [0.0] * 8}}, "long_factor=0.0 .*above 0"),
        ("glm4", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 2.0}}, "factor=2.0 .*at most 1"),
        ("mistral window", {"sliding_window": 0}, "sliding_window=0 .*must be a number above 0"),
        ("mistral window", {"sliding_window": -3}, "sliding_window=-3 .*must be a number above 0"),
        ("gemma2", {"sliding_window": -1}, "sliding_window=-1 .*must be a number above 0"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0 .*must be a number above 0"),
        ("gemma2", {"final_logit_softcapping": 0.0}, "final_logit_softcapping=0.0 .*must be a number above 0"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True .*not supported"),
        ("granite", {"logits_scaling": 0}, "logits_scaling=0 .*must be a number above 0"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers .*has 2 entries: .*num_hidden_layers=4"),
        ("gemma3 multimodal", {"quantization_config": {"quant_method": "awq"}}, "quantization_config=.*not supported"),
    ],
)  # fmt: skip
def test_a_setting_that_no_model_can_have_is_named(name: str, changes: dict[str, Any], message: str) -> None:
    case = CASES[name]
    settings = {**SHAPE, **case.settings}
    if case.vision is not None:
        settings = {"text_config": settings, "vision_config": case.vision}
    config = AutoConfig.for_model(case.model_type, architectures=[case.architecture], **settings)
    for setting, value in changes.items():
        setattr(config, setting, value)
    with pytest.raises(ValueError, match=message):
        describe(config)


def test_every_class_has_a_case() -> None:
    assert {case.architecture for case in CASES.values()} == set(FAMILIES)


def test_the_page_that_says_how_to_add_a_model(
    tmp_path: Path, make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's example, saved as a file, runs the class that it describes."""
    page = (Path(__file__).parent.parent / "docs" / "add-a-model.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    (line,) = re.findall(r'`"(\w+)": "(acme\.describe)"`', page)
    (tmp_path / "acme.py").write_text(code)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    monkeypatch.setitem(FAMILIES, *line)
    folder = tmp_path / "checkpoint"
    model = build(Case("Qwen2ForCausalLM", "qwen2"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [line[0]]}))
    run(make_llm(str(folder), kvcache_block_size=16, max_model_len=320), model, prompt_logprobs=0)


COUNTER = '''
"""A model whose next token is the last one's successor."""

from contextlib import nullcontext
from dataclasses import replace

import torch

from nanoinfer.models.causal_lm import CausalLM
from nanoinfer.models.families import qwen3


def describe(config):
    return replace(qwen3.describe(config), module="nanoinfer.models.families.counter.Counter")


class Counter(CausalLM):
    first_id, num_ids = 0, 100

    def __init__(self, *args):
        super().__init__(*args)

    def forward(self, token_ids, context):
        return (token_ids.unsqueeze(1) + 1) % self.num_ids

    def compute_logits(self, hidden, out=None):
        logits = (hidden == torch.arange(self.num_ids, device=hidden.device)).float()
        return logits if out is None else out.copy_(logits)

    def one_of_each(self):
        return nullcontext()

    def fix_order(self, sizes, tokens):
        pass

    def fix_parts(self):
        pass
'''


def test_a_family_may_name_a_module_of_its_own(
    tmp_path: Path, make_llm: Callable[..., LLM], make_qwen3: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner builds the class that the description names."""
    (tmp_path / "counter.py").write_text(COUNTER)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    monkeypatch.setitem(FAMILIES, "Qwen3ForCausalLM", "counter.describe")
    llm = make_llm(make_qwen3(vocab_size=100), load_format="dummy")
    outputs = llm.generate([[3, 7], [98]], greedy(4, ignore_eos=True), use_tqdm=False)
    assert [output["token_ids"] for output in outputs] == [[8, 9, 10, 11], [99, 0, 1, 2]]
