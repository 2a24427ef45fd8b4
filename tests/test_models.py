"""Compares every family with transformers: random float32 weights, greedy tokens and log-probabilities everywhere."""

from __future__ import annotations

import copy
import functools
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from cases import CASES, MULTIMODAL, SHAPE, VOCAB, Case, build
from cases.case import LINEAR, LLAMA3, LONGROPE, YARN
from cases.corrected import MIMO
from conftest import greedy, of_each_kind, whole_only
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedModel
from transformers.models.dbrx.configuration_dbrx import DbrxAttentionConfig, DbrxFFNConfig

from nanoinfer import LLM, RequestOutput
from nanoinfer.config import Config
from nanoinfer.layers.delta import GatedDelta
from nanoinfer.layers.linear import RowParallelLinear
from nanoinfer.models import FAMILIES, describe, families
from nanoinfer.models.ranks import check_in_order, check_ranks

DRAWN = [1, 2, 15, 16, 17, 40, 100, 300]  # tokens of prompts
LENGTHS = [1, 15, 17, 40, 300]  # of those that run in one batch
MAX_TOKENS = 4
TWICE = {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 2.0}
GEMMA4_ROPES = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
MSCALES = {**LONGROPE, "original_max_position_embeddings": 320, "long_mscale": 1.3}
HALF = {"rope_theta": 1e4, "partial_rotary_factor": 0.5}


KNOWN = WeakKeyDictionary[PreTrainedModel, dict[tuple[int, ...], torch.Tensor]]()


@torch.inference_mode()
def logprobs(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Return log-probabilities after each token, [tokens, vocabulary], which the same weights compute once."""
    version = sum(parameter._version for parameter in model.parameters())  # counts changes in place
    known, key = KNOWN.setdefault(model, {}), (version, *tokens)
    if key not in known:
        known[key] = model(input_ids=torch.tensor([tokens])).logits[0].float().log_softmax(dim=-1)
    return known[key]


def check(output: RequestOutput, prompt: list[int], model: PreTrainedModel, length_matters: bool) -> None:
    """Check that each token is the likeliest after the tokens before it, and log-probabilities equal transformers'."""
    tokens = output["token_ids"]
    assert len(tokens) == MAX_TOKENS
    if output["prompt_logprobs"] is not None:
        ours = [entry[token] for entry, token in zip(output["prompt_logprobs"][1:], prompt[1:], strict=True)]
        whole = logprobs(model, prompt if length_matters else prompt + tokens[:-1])
        assert ours == pytest.approx(whole[range(len(prompt) - 1), prompt[1:]].tolist(), abs=1e-4)
    if length_matters:  # a longer sequence has other frequencies, and so other logits at all positions
        rows = torch.stack([logprobs(model, prompt + tokens[:i])[-1] for i in range(MAX_TOKENS)])
    else:
        rows = logprobs(model, prompt + tokens[:-1])[len(prompt) - 1 :]
    assert tokens == rows.argmax(dim=-1).tolist()
    ours = [entry[token] for entry, token in zip(output["logprobs"], tokens, strict=True)]
    assert ours == pytest.approx(rows[range(MAX_TOKENS), tokens].tolist(), abs=1e-4)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    drawn = {length: torch.randint(VOCAB, (length,), generator=generator).tolist() for length in DRAWN}
    return [drawn[length] for length in LENGTHS]


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
OF_HEADS = ["stablelm side by side, head norms", "cohere head norms", "phi head norms"]


@pytest.mark.parametrize("name", [*LAST_OF_CLASSES, *whole_only(name for name in CASES if name not in LAST_OF_CLASSES)])
def test_a_family_equals_transformers(
    name: str, family: Callable[[str], tuple[str, PreTrainedModel]], make_llm: Callable[..., LLM]
) -> None:
    """Prompts are fresh, then prefix-cached, then in chunks in a cache so small that they wait for blocks."""
    folder, model = family(name)
    llm = make_llm(folder, **CASES[name].small)
    run(llm, model, prompt_logprobs=0)
    run(llm, model)
    run(make_llm(folder, **CASES[name].tight), model)


@pytest.mark.parametrize("name", [*whole_only(["qwen3"]), "qwen2moe"])
def test_an_activation_that_the_second_product_applies(
    name: str,
    family: Callable[[str], tuple[str, PreTrainedModel]],
    make_llm: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So it is on a GPU in FP8, for several tokens: the launch that rounds them applies it."""
    monkeypatch.setattr(RowParallelLinear, "can_apply_activation", lambda self, tokens, adapters: tokens > 1)
    folder, model = family(name)
    run(make_llm(folder, kvcache_block_size=16, max_model_len=320), model)


@pytest.mark.parametrize(
    "name", [*OF_KINDS, *whole_only(name for name in [*LAST_OF_CLASSES, *OF_HEADS] if name not in OF_KINDS)]
)
def test_two_ranks(
    name: str, family: Callable[[str], tuple[str, PreTrainedModel]], make_llm: Callable[..., LLM]
) -> None:
    folder, model = family(name)
    llm = make_llm(folder, device="cpu", tensor_parallel_size=2, **CASES[name].small)
    run(llm, model, prompt_logprobs=0)


@pytest.mark.multi_gpu
@pytest.mark.parametrize(
    "name",
    [
        "llama biases, llama3 rope",
        "gemma2",
        "gemma3",
        "olmo2 biases",
        "granite",
        "glm4",
        "qwen2moe",
        "qwen3moe",
        "gemma4",
        "gemma4 experts",
        "gptoss",
        "glm4moe",
        "mimo-v2",
    ],
)
def test_two_gpus(
    name: str, family: Callable[[str], tuple[str, PreTrainedModel]], make_llm: Callable[..., LLM]
) -> None:
    """Models with norms after branches, biases or experts take another way through the sums over ranks."""
    folder, model = family(name)
    run(make_llm(folder, tensor_parallel_size=2, **CASES[name].small), model, prompt_logprobs=0)


@pytest.mark.parametrize("name", ["olmo2", "qwen3.5"])
def test_more_ranks_than_kv_heads(name: str, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """Both ranks hold the only key head. OLMo 2's norm over all heads must count its numbers once."""
    case = CASES[name]
    model = build(replace(case, settings={**case.settings, "num_key_value_heads": 1}), tmp_path)
    llm = make_llm(str(tmp_path), device="cpu", tensor_parallel_size=2, **case.small)
    run(llm, model, prompt_logprobs=0)


@pytest.mark.parametrize("name", of_each_kind(MULTIMODAL, 0))
def test_the_other_order_of_a_multimodal_checkpoints_names(
    name: str, make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    """Older names have "language_model.model.", newer "model.language_model."; Qwen2.5-VL's first had neither."""
    model = build(CASES[name], tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    is_old = not any(key.startswith("model.language_model.") for key in weights)

    def renamed(key: str) -> str:
        key = key.replace("mlp_AR.", "projector.")  # PaddleOCR-VL's
        beside = "vision", "visual", "projector", "audio", "connector", "merger", "density_router", "image_newline"
        if any(part in key for part in beside):
            return key.removeprefix("model.") if key.startswith("model.") else f"model.{key}"
        if is_old:
            key = key.removeprefix("language_model.")
            return key if key.startswith("lm_head") else key.replace("model.", "model.language_model.", 1)
        return key.replace("model.language_model.", "language_model.model.", 1)

    save_file({renamed(key): weight for key, weight in weights.items()}, file, {"format": "pt"})
    assert not set(load_file(file)) & set(weights) - {"lm_head.weight"}
    run(make_llm(str(tmp_path), **CASES[name].small), model)


def test_files_of_before_transformers_5(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """They lack the model's own name, call the head otherwise, or hold the masks of attention."""
    masks = {"attn.bias": torch.ones(1, 1, 4, 4), "attn.masked_bias": torch.tensor(-1e4)}
    in_neox = {f"attention.{name.removeprefix('attn.')}": mask for name, mask in masks.items()}
    changes: dict[str, tuple[Callable[[str], str], str, dict[str, torch.Tensor]]] = {
        "gpt2": (lambda key: key.removeprefix("transformer."), "h.0.", masks),
        "gptneox": (lambda key: key.replace("lm_head", "embed_out"), "gpt_neox.layers.0.", in_neox),
        "gptj": (lambda key: key, "transformer.h.0.", masks),
        "bloom": (lambda key: key.removeprefix("transformer."), "", {}),
        "opt": (lambda key: key.removeprefix("model."), "", {}),
    }
    for name, (renamed, layer, others) in changes.items():
        folder = tmp_path / name
        model = build(CASES[name], folder)
        weights = {renamed(key): weight for key, weight in load_file(folder / "model.safetensors").items()}
        weights |= {f"{layer}{key}": mask for key, mask in others.items()}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        run(make_llm(str(folder), **CASES[name].small), model)


def test_published_files_of_mimo_v2(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """Their config says in its own words which layers have windows, and weights of layers that guess are beside."""
    case = replace(CASES["mimo-v2"], settings={**MIMO, "sliding_window": 25, "num_hidden_layers": 6})
    model = build(case, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("layer_types", "mlp_layer_types", "rope_parameters", "sliding_window"):
        del config[name]
    published = {
        "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1, 1, 1],
        "sliding_window": 24,
        "sliding_window_size": 24,
        "rope_theta": 5000000,
        "swa_rope_theta": 10000,
        "partial_rotary_factor": 0.334,
        "routed_scaling_factor": None,
        "n_shared_experts": None,
        "swa_num_key_value_heads": 4,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config | published))
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.mtp.layers.0.eh_proj.weight"] = torch.zeros(48, 96)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    run(make_llm(str(tmp_path), **case.small), model)


@pytest.mark.parametrize("name", ["gpt2", *whole_only(["gptneox", "opt", "apertus", "modernbert"]), "olmohybrid"])
def test_a_trainer_updates_weights_by_transformers_names(
    name: str, family: Callable[[str], tuple[str, PreTrainedModel]], make_llm: Callable[..., LLM]
) -> None:
    """A GPT-2's matrices come as [in, out]."""
    folder, model = family(name)
    llm = make_llm(folder, **CASES[name].small)
    changed = copy.deepcopy(model)
    for parameter in changed.parameters():
        parameter.data *= 1.1
    llm.update_weights(changed.named_parameters())
    run(llm, changed)


@pytest.mark.parametrize("name", ["qwen2-vl", *whole_only(["qwen2-vl windows", "qwen2.5-vl"])])
def test_the_first_configs_of_qwen2_vl_are_flat(name: str, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """The language model's settings stand beside vision_config, and name the rotation otherwise."""
    model = build(CASES[name], tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    scaling = {"rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}
    file.write_text(json.dumps({**text, "rope_theta": rope["rope_theta"], **scaling, **config}))
    run(make_llm(str(tmp_path), kvcache_block_size=16, max_model_len=320), model, prompt_logprobs=0)


def test_a_mistral_with_layer_types_has_windows_on_those_alone(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """Ministral 8B has layer_types. transformers gives the model another model_type than its config.json."""
    kinds = ["sliding_attention", "full_attention"] * 2
    model = build(Case("MinistralForCausalLM", "ministral", {"sliding_window": 24, "layer_types": kinds}), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    names = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    (tmp_path / "config.json").write_text(json.dumps({**config, **names}))
    run(make_llm(str(tmp_path), kvcache_block_size=16, max_model_len=320), model, prompt_logprobs=0)


def test_a_gemma_4_may_have_keys_and_values_in_layers_that_use_anothers(
    make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    """Published checkpoints have them; transformers leaves them out of those that it saves."""
    model = build(CASES["gemma4"], tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    for name in ("k_proj.weight", "v_proj.weight", "k_norm.weight"):
        for layer, source in ((4, 2), (5, 3)):
            unused = torch.randn_like(weights[f"model.layers.{source}.self_attn.{name}"])
            assert weights.setdefault(f"model.layers.{layer}.self_attn.{name}", unused) is unused
    save_file(weights, file, {"format": "pt"})
    run(make_llm(str(tmp_path), **CASES["gemma4"].small), model)


@pytest.mark.parametrize("name", ["qwen3-vl", "qwen3-vl-moe"])
def test_windows_that_qwen3_vl_does_not_have(name: str) -> None:
    case = CASES[name]
    text = {**SHAPE, **case.settings, "sliding_window": 24, "layer_types": ["sliding_attention"] * 4}
    with pytest.raises(ValueError, match="layer_types='sliding_attention' in its config is not supported"):
        describe(AutoConfig.for_model(case.model_type, text_config=text, architectures=[case.architecture]))


def test_a_sequence_of_phi_3_5_moe_ends_where_the_rotation_would_be_stretched(
    family: Callable[[str], tuple[str, PreTrainedModel]],
) -> None:
    folder = family("phimoe longrope")[0]
    with pytest.raises(ValueError, match=r"max_model_len=321.* 320"):
        Config(folder, max_model_len=321)


def test_a_multimodal_checkpoint_says_that_it_is_run_as_text_only(
    family: Callable[[str], tuple[str, PreTrainedModel]],
    make_llm: Callable[..., LLM],
    caplog: pytest.LogCaptureFixture,
) -> None:
    make_llm(family("gemma3 multimodal")[0], max_model_len=64)
    (warning,) = [record for record in caplog.records if record.name == "nanoinfer"]
    assert "its language model is run, as text only: the checkpoint has no processor of images" in warning.getMessage()


def test_keys_and_values_in_fp8_beside_states(
    family: Callable[[str], tuple[str, PreTrainedModel]], make_llm: Callable[..., LLM], caplog: pytest.LogCaptureFixture
) -> None:
    """The log says what is in FP8. Tokens are drawn, and the log-probabilities are near transformers'."""
    caplog.set_level("INFO", "nanoinfer")
    folder, model = family("qwen3.5")
    llm = make_llm(folder, **CASES["qwen3.5"].small, kv_cache_dtype="fp8")
    assert "keys and values are in FP8; the states of other layers stay in float32" in caplog.text
    (prompt,) = prompts()[-1:]
    (output,) = llm.generate([prompt], greedy(1, prompt_logprobs=0, ignore_eos=True), use_tqdm=False)
    ours = torch.tensor([entry[token] for entry, token in zip(output["prompt_logprobs"][1:], prompt[1:], strict=True)])
    theirs = logprobs(model, prompt)[range(len(prompt) - 1), prompt[1:]]
    assert 1e-4 < (ours - theirs).abs().mean() < 0.1


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
    heads = model.kv_heads[:1] * len(windows)
    changed = replace(
        model,
        num_layers=len(windows),
        windows=tuple(windows),
        ropes=ropes,
        mixers=mixers,
        kv_heads=heads,
        experts=made,
    )
    assert changed.different_layers == layers


def test_the_different_layers_run_alone(
    family: Callable[[str], tuple[str, PreTrainedModel]], make_llm: Callable[..., LLM]
) -> None:
    folder, model = family("gemma3")
    llm = make_llm(folder, enforce_eager=True)  # a graph would call no hook
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
        ("llama", {"rope_parameters": {**YARN, "attention_factor": "x"}}, "attention_factor='x' .*a number above 0"),
        ("llama yarn", {"rope_parameters": {**YARN, "mscale": "x", "mscale_all_dim": 1.0}}, "mscale='x' .*above 0"),
        ("llama", {"rope_parameters": {**LINEAR, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5 .*not sup"),
        ("phi3 longrope", {"original_max_position_embeddings": 1}, "original_max_position_embeddings=1 .*above 1"),
        ("phi3 longrope", {"rope_parameters": {**LONGROPE, "long_factor": [0.0] * 8}}, "long_factor=0.0 .*above 0"),
        ("phi3 longrope", {"rope_parameters": {**LONGROPE, "long_factor": [1.0] * 9}}, "long_factor=.*list of 8 num"),
        ("deepseek-v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim=7 .*must be even"),
        ("glm4", {"rope_parameters": {**HALF, "partial_rotary_factor": 2.0}}, "factor=2.0 .*at most 1"),
        ("mistral window", {"sliding_window": 0}, "sliding_window=0 .*must be a number above 0"),
        ("mistral window", {"sliding_window": -3}, "sliding_window=-3 .*must be a number above 0"),
        ("gemma2", {"sliding_window": -1}, "sliding_window=-1 .*must be a number above 0"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0 .*must be a number above 0"),
        ("gemma2", {"final_logit_softcapping": 0.0}, "final_logit_softcapping=0.0 .*must be a number above 0"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True .*not supported"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True .*not supported"),
        ("gemma", {"layer_types": ["sliding_attention"] * 4}, "layer_types='sliding_attention' .*not supported"),
        ("vaultgemma", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping=-1.0 .*must be a number above 0"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all' .*not supported"),
        ("gemma4", {"per_layer_config": {1: {"num_key_value_heads": 3}}}, "num_key_value_heads=3 .*divisor of num_att"),
        ("gemma4", {"per_layer_config": {1: {"head_dim": 0}}}, "head_dim=0 .*must be an integer of at least 1"),
        ("gemma4", {"layer_types": ["full_attention", "conv"] * 3}, "layer_types='conv' .*not supported"),
        ("gemma4", {"rope_parameters": {**GEMMA4_ROPES, "full_attention": TWICE}}, "factor=2.0 .*at most 1"),
        ("gemma4", {"rope_parameters": {"sliding_attention": HALF}}, "rope_parameters has only sliding_attention"),
        ("gemma4 experts", {"top_k_experts": 7}, "top_k_experts=7 .*must be at most the number of experts, 6"),
        ("gemma4 experts", {"moe_intermediate_size": None}, "moe_intermediate_size=None .*must be an integer of at"),
        ("gemma4", {"num_kv_shared_layers": 5}, "num_kv_shared_layers=5 .*leave a layer of each of layer_types"),
        ("gemma4", {"num_kv_shared_layers": -1}, "num_kv_shared_layers=-1 .*must be an integer of at least 0"),
        ("gemma4", {"vocab_size_per_layer_input": 9}, "vocab_size_per_layer_input=9 .*must be vocab_size=160"),
        ("gemma4", {"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input=-1 .*integer of at least 1"),
        ("exaone4 without windows", {"layer_types": ["sliding_attention"] * 4}, "layer_types='sliding_att.*not sup"),
        ("exaone4 windows, llama3 rope", {"sliding_window": 0}, "sliding_window=0 .*must be a number above 0"),
        ("glm", {"rope_parameters": {**HALF, "partial_rotary_factor": 2.0}}, "factor=2.0 .*at most 1"),
        ("granite", {"logits_scaling": 0}, "logits_scaling=0 .*must be a number above 0"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers .*has 2 entries: .*num_hidden_layers=4"),
        ("mellum", {"mlp_layer_types": ["dense", "moe"] * 2}, "mlp_layer_types='moe' .*must be 'sparse' or 'dense'"),
        ("mellum", {"mlp_layer_types": ["dense"]}, "mlp_layer_types .*has 1 entries: .*num_hidden_layers=4"),
        ("mellum", {"rope_parameters": {"full_attention": HALF}}, "partial_rotary_factor=0.5 .*not supported"),
        ("granitemoe", {"num_local_experts": 0}, "num_local_experts=0 .*must be an integer of at least 1"),
        ("granitemoe", {"attention_multiplier": 0}, "attention_multiplier=0 .*must be a number above 0"),
        ("granitemoe", {"embedding_multiplier": None}, "embedding_multiplier=None .*must be a number above 0"),
        ("graniteswa", {"residual_multiplier": math.nan}, "residual_multiplier=nan .*must be a number above 0"),
        ("gptoss", {"swiglu_limit": 0.0}, "swiglu_limit=0.0 .*must be a number above 0"),
        ("gptoss", {"swiglu_alpha": -1.7}, "swiglu_alpha=-1.7 .*must be a number above 0"),
        ("gptoss", {"hidden_act": "relu"}, "hidden_act='relu' .*not supported"),
        ("gptoss", {"layer_types": ["chunked_attention"] * 4}, "layer_types='chunked_attention' .*not supported"),
        ("gptoss", {"num_local_experts": 1}, "num_experts_per_tok=2 .*must be at most the number of experts, 1"),
        ("gptoss", {"quantization_config": {"quant_method": "fp8"}}, "FP8 of quantization_config .*with biases"),
        ("graniteswa", {"layer_rope_theta": [1e4]}, "layer_rope_theta .*has 1 entries: .*num_hidden_layers=4"),
        ("graniteswa", {"layer_rope_theta": [-1.0] * 4}, "rope_theta=-1.0 .*must be a number above 0"),
        ("granitemoeswa", {"shared_intermediate_size": 8}, "shared_intermediate_size=8 .*not supported"),
        ("granitemoeshared", {"shared_intermediate_size": -8}, "shared_intermediate_size=-8 .*must be"),
        ("hyperclovax", {"residual_multiplier": 0.5}, "residual_multiplier=0.5 .*must be 1 with use_post_norm=True"),
        ("hunyuanmoe", {"moe_topk": [3, 3, 3, 2]}, r"moe_topk=\[3, 3, 3, 2\] .*must be the same in all layers"),
        ("hunyuanmoe", {"moe_topk": [3]}, "moe_topk .*has 1 entries: .*num_hidden_layers=4"),
        ("hunyuanmoe", {"moe_topk": 7}, "moe_topk=7 .*must be at most the number of experts, 6"),
        ("hunyuanmoe", {"num_experts": 0}, "num_experts=0 .*must be an integer of at least 1"),
        ("hunyuanmoe", {"rope_parameters": YARN}, "rope_type='yarn' .*not supported"),
        ("phimoe", {"num_experts_per_tok": 1}, "num_experts_per_tok=1 .*not supported"),
        ("phimoe", {"num_local_experts": 1}, "num_experts_per_tok=2 .*must be at most the number of experts, 1"),
        ("phimoe", {"router_jitter_noise": 0.0}, "router_jitter_noise=0.0 .*must be a number above 0"),
        ("phimoe", {"lm_head_bias": True}, "lm_head_bias=True .*not supported"),
        ("phimoe", {"rope_parameters": YARN}, "rope_type='yarn' .*not supported"),
        ("phimoe longrope", {"rope_parameters": {**MSCALES, "short_mscale": 0}}, "short_mscale=0 .*above 0"),
        ("dbrx", {"attn_config": DbrxAttentionConfig(rope_theta=0)}, "rope_theta=0 .*must be a number above 0"),
        ("dbrx", {"attn_config": DbrxAttentionConfig(clip_qkv=0)}, "clip_qkv=0 .*must be a number above 0"),
        ("dbrx", {"num_key_value_heads": 3}, "num_key_value_heads=3 .*must be a divisor of num_attention_heads=4"),
        ("dbrx", {"ffn_config": DbrxFFNConfig(moe_top_k=5)}, "moe_top_k=5 .*must be at most the number of experts, 4"),
        ("dbrx", {"ffn_config": DbrxFFNConfig(ffn_hidden_size=0)}, "ffn_hidden_size=0 .*must be an integer"),
        ("dbrx", {"ffn_config": DbrxFFNConfig(ffn_act_fn={"name": "gelu"})}, "ffn_act_fn={'name': 'gelu'} .*not supp"),
        ("dbrx", {"ffn_config": DbrxFFNConfig(moe_normalize_expert_weights=2.0)}, "expert_weights=2.0 .*not supported"),
        ("flint", {"mlp_only_layers": [4]}, r"mlp_only_layers=\[4\] .*must be layers from 0 to 3"),
        ("qwen3.5", {"layer_types": ["linear_attention"] * 4}, "layer_types .*some layer must be 'full_attention'"),
        ("qwen3.5", {"layer_types": ["full_attention"]}, "layer_types .*has 1 entries: .*num_hidden_layers=4"),
        ("qwen3.5", {"layer_types": ["full_attention", "conv"] * 2}, "layer_types='conv' .*supported here: linear"),
        ("qwen3.5", {"linear_num_key_heads": 3}, "linear_num_key_heads=3 .*must be a divisor of linear_num_value"),
        ("qwen3.5", {"linear_value_head_dim": 0}, "linear_value_head_dim=0 .*must be an integer of at least 1"),
        ("qwen3.5", {"linear_conv_kernel_dim": -4}, "linear_conv_kernel_dim=-4 .*must be an integer of at least 1"),
        ("qwen3.5", {"linear_conv_kernel_dim": 65}, "linear_conv_kernel_dim=65 .*must be at most 64"),
        ("qwen3.5", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act='gelu_pytorch_tanh' .*not supported"),
        ("qwen3.5", {"attn_output_gate": False}, "attn_output_gate=False .*not supported"),
        ("qwen3.5moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size=0 .*at least 1"),
        ("lfm2", {"layer_types": ["linear_attention"] * 4}, "layer_types='linear_attention' .*supported here: conv"),
        ("lfm2", {"conv_L_cache": 0}, "conv_L_cache=0 .*must be an integer of at least 1"),
        ("lfm2", {"block_multiple_of": 0}, "block_multiple_of=0 .*must be an integer of at least 1"),
        ("lfm2", {"block_ffn_dim_multiplier": -1.0}, "block_ffn_dim_multiplier=-1.0 .*must be a number above 0"),
        ("glm4moe", {"first_k_dense_replace": -1}, "first_k_dense_replace=-1 .*must be an integer of at least 0"),
        ("glm4moe", {"num_nextn_predict_layers": "x"}, "num_nextn_predict_layers='x' .*integer of at least 0"),
        ("glm4moe", {"n_shared_experts": 0}, "n_shared_experts=0 .*must be an integer of at least 1"),
        ("glm4moe", {"routed_scaling_factor": 0.0}, "routed_scaling_factor=0.0 .*must be a number above 0"),
        ("glm4moe", {"topk_group": 2}, "topk_group=2 .*must be at most n_group=1"),
        ("glm4moe", {"n_group": 4}, "n_group=4 .*must divide 6 experts into groups of two or more"),
        ("glm4moe", {"n_group": 6}, "n_group=6 .*must divide 6 experts into groups of two or more"),
        ("solar-open groups, biases", {"num_experts_per_tok": 7}, "topk_group=2 .* than num_experts_per_tok=7"),
        ("mimo-v2", {"num_key_value_heads": 4}, "num_key_value_heads=4 .*: 8, as many as .*a divisor of num_att"),
        ("mimo-v2", {"rope_parameters": {**GEMMA4_ROPES, "full_attention": TWICE}}, "factor=2.0 .*at most 1"),
        ("mimo-v2", {"v_head_dim": 15}, "v_head_dim=15 .*must be even"),
        ("mimo-v2", {"attention_value_scale": -1.0}, "attention_value_scale=-1.0 .*must be a number above 0"),
        ("mimo-v2", {"hybrid_layer_pattern": [0, 1, 0, 1]}, r"hybrid_layer_pattern=\[0, 1, 0, 1\] .*not supported"),
        ("mimo-v2", {"moe_layer_freq": [1] * 4}, r"moe_layer_freq=\[1, 1, 1, 1\] .*not supported"),
        ("mimo-v2", {"swa_v_head_dim": 24}, "swa_v_head_dim=24 .*not supported"),
        ("mimo-v2", {"swa_rope_theta": 5e4}, "swa_rope_theta=50000.0 .*not supported"),
        ("mimo-v2", {"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias=True .*not supported"),
        ("minimax-m2", {"num_local_experts": 2}, "num_experts_per_tok=3 .*must be at most the number of experts, 2"),
        ("hy3", {"router_scaling_factor": -1.0}, "router_scaling_factor=-1.0 .*must be a number above 0"),
        ("ernie4.5moe", {"use_bias": True}, "use_bias=True .*not supported"),
        ("ernie4.5moe", {"moe_norm_min": 0.0}, "moe_norm_min=0.0 .*must be a number above 0"),
        ("ernie4.5moe", {"moe_layer_interval": 0}, "moe_layer_interval=0 .*must be an integer of at least 1"),
        ("ernie4.5moe", {"moe_layer_end_index": None}, "moe_layer_end_index=None .*must be an integer of at least 0"),
        ("lfm2moe", {"layer_types": None}, "layer_types .*has 0 entries: .*num_hidden_layers=4"),
        ("lfm2moe", {"num_dense_layers": -2}, "num_dense_layers=-2 .*must be an integer of at least 0"),
        ("afmoe", {"attention_bias": True}, "attention_bias=True .*not supported"),
        ("afmoe", {"sliding_window": None}, "sliding_window=None .*must be a number above 0"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True .*not supported"),
        ("gpt2", {"activation_function": "mish"}, "activation_function='mish' .*not supported; supported: silu, gelu,"),
        ("gpt2", {"n_inner": 0}, "n_inner=0 .*must be an integer of at least 1"),
        ("gptj", {"rotary_dim": 7}, "rotary_dim=7 .*must be even, and at most 16"),
        ("codegen", {"n_head": 2}, "n_head=2 .*must be a multiple of 4"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_.*=True .*not supported"),
        ("falcon 40b", {"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn=3 .*must be 1 or 2"),
        ("mpt", {"logit_scale": 2.0}, "logit_scale=2.0 .*not supported"),
        ("cohere", {"logit_scale": 0.0}, "logit_scale=0.0 .*must be a number above 0"),
        ("olmo", {"clip_qkv": -1.0}, "clip_qkv=-1.0 .*must be a number above 0"),
        ("kolibri", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size=0 .*of at least 1"),
        ("kolibri", {"sliding_window": 0}, "sliding_window=0 .*must be a number above 0"),
        ("kolibri", {"num_experts_per_tok": 7}, "num_experts_per_tok=7 .*must be at most the number of experts, 6"),
        ("gemma3 multimodal", {"quantization_config": {"quant_method": "hqq"}}, "quantization_config=.*not supported"),
        ("apertus", {"hidden_act": "tanh"}, "hidden_act='tanh' .*not supported; supported: silu"),
        ("apertus1.5", {"output_vocab_size": 0}, "output_vocab_size=0 .*must be an integer of at least 1"),
        ("apertus1.5", {"output_vocab_size": 201}, "output_vocab_size=201 .*must be at most vocab_size=200"),
        ("apertus1.5", {"tie_word_embeddings": True}, "tie_word_embeddings=True .*not supported"),
        ("apertus1.5 multimodal", {"tie_word_embeddings": True}, "tie_word_embeddings=True .*not supported"),
        ("modernbert", {"classifier_activation": "tanh"}, "classifier_activation='tanh' .*not supported; supported"),
        ("modernbert", {"sliding_window": -1}, "sliding_window=-1 .*must be a number above 0"),
        ("muse-glimmer", {"attention_bias": True}, "attention_bias=True .*not supported"),
        ("muse-glimmer", {"post_norm_eps": 0.0}, "post_norm_eps=0.0 .*must be a number above 0"),
        ("muse-glimmer", {"qk_scale_factor": -1.0}, "qk_scale_factor=-1.0 .*must be a number above 0"),
        ("muse-glimmer", {"output_multiplier": 0.0}, "output_multiplier=0.0 .*must be a number above 0"),
        ("muse-glimmer", {"final_logit_softcapping": 0.0}, "final_logit_softcapping=0.0 .*must be a number above 0"),
        ("muse-glimmer", {"layer_rope_theta": [0]}, "layer_rope_theta .*has 1 entries: .*num_hidden_layers=4"),
        ("olmohybrid", {"hidden_act": "gelu"}, "hidden_act='gelu' .*not supported"),
        ("olmohybrid", {"linear_num_key_heads": 3}, "linear_num_key_heads=3 .*must be a divisor of linear_num_value"),
        ("olmohybrid", {"layer_types": ["conv"] * 4}, "layer_types='conv' .*supported here: linear_attention"),
        ("opt", {"word_embed_proj_dim": 0}, "word_embed_proj_dim=0 .*must be an integer of at least 1"),
    ],
)  # fmt: skip
def test_a_setting_that_no_model_can_have_is_named(name: str, changes: dict[str, Any], message: str) -> None:
    case = CASES[name]
    settings = case.text_settings
    if case.vision is not None:
        settings = {"text_config": settings, "vision_config": case.vision, **case.outer}
    config = AutoConfig.for_model(case.model_type, architectures=[case.architecture], **settings)
    text = config.get_text_config()
    for setting, value in changes.items():
        is_of_text = hasattr(text, setting) and not hasattr(config, setting)
        setattr(text if is_of_text else config, setting, value)
    with pytest.raises(ValueError, match=message):
        describe(config)


@pytest.mark.parametrize(
    ("name", "ranks", "message"),
    [
        ("qwen3.5", 4, "tensor_parallel_size=4: linear_num_key_heads=2 is not divisible by it; use a divisor: 1, 2$"),
        (
            "gemma4",
            5,
            "tensor_parallel_size=5: hidden_size_per_layer_input=12 is not divisible by it; use a divisor: 1, 2, 3",
        ),
        ("lfm2", 5, "tensor_parallel_size=5: hidden_size=48 is not divisible by it; use a divisor: 1, 2, 3, 4, 6, 8$"),
    ],
)
def test_ranks_that_a_mixer_cannot_have(name: str, ranks: int, message: str) -> None:
    case = CASES[name]
    heads = {"num_attention_heads": 20, "num_key_value_heads": 20, "intermediate_size": 80, "vocab_size": 400}
    sizes = {**heads, "block_auto_adjust_ff_dim": False, "vocab_size_per_layer_input": heads["vocab_size"]}
    settings = {**case.text_settings, **sizes}
    config = AutoConfig.for_model(case.model_type, architectures=[case.architecture], **settings)
    with pytest.raises(ValueError, match=message):
        check_ranks(describe(config), ranks)


def test_ranks_that_would_part_queries_from_their_keys(family: Callable[[str], tuple[str, PreTrainedModel]]) -> None:
    for name, runs in (("falcon 40b", 2), ("codegen", 4)):
        model = Config(family(name)[0], device="cpu").description
        check_ranks(model, runs)
        with pytest.raises(ValueError, match=f"size={2 * runs}: .* keys and values together, in {runs} runs"):
            check_ranks(replace(model, num_heads=8), 2 * runs)


def test_states_are_deterministic_on_gpus(family: Callable[[str], tuple[str, PreTrainedModel]]) -> None:
    """But for groups of heads that one norm takes and ranks would share."""
    for name, ranks in (("lfm2", 2), ("qwen3.5", 2), ("olmohybrid", 2), ("bamba", 1), ("falconh1", 2)):
        model = describe(family(name)[1].config)
        check_in_order(model, ranks, on_cpu=False)
        with pytest.raises(ValueError, match="the CPU computes states in another way"):
            check_in_order(model, 2, on_cpu=True)
    config = copy.deepcopy(family("granitemoehybrid")[1].config)
    config.mamba_n_groups = 1
    model = describe(config)
    with pytest.raises(ValueError, match="mamba_n_groups=1: ranks would add up the squares of one group's norm"):
        check_in_order(model, 2, on_cpu=False)


def test_every_class_has_a_case() -> None:
    assert {case.architecture for case in CASES.values()} == set(FAMILIES)


@pytest.mark.parametrize(("name", "published"), [("mpt", "MPTForCausalLM"), ("phimoe", "PhiMoEForCausalLM")])
def test_classes_as_their_authors_spell_them(name: str, published: str) -> None:
    case = CASES[name]
    ours, theirs = (
        describe(AutoConfig.for_model(case.model_type, architectures=[name], **case.text_settings))
        for name in (case.architecture, published)
    )
    assert ours == theirs


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
    first_id, num_ids, each_layer = 0, 100, ()

    def __init__(self, *args):
        super().__init__(*args)

    def forward(self, token_ids, context):
        return (token_ids.unsqueeze(1) + 1) % self.num_ids

    def compute_logits(self, hidden, out=None):
        logits = (hidden == torch.arange(self.num_ids, device=hidden.device)).float()
        return logits if out is None else out.copy_(logits)

    def keep_hidden_states(self, slots):
        pass

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
