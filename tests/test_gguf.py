"""GGUF files, as the package gguf writes them, against transformers on the weights that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

gguf = pytest.importorskip("gguf", reason="GGUF files need the package gguf: pip install 'nanoinfer[gguf]'")

import huggingface_hub
import numpy as np
import torch
from cases import CASES, Case, build
from cases.case import LLAMA3, YARN
from cases.gguf_files import Types, in_type, plain, write_gguf
from cases.sparse import EXPERTS
from cases.tuned import ALPHA, Tuned
from conftest import greedy, whole_only
from safetensors.torch import load_file, save_file
from test_models import run
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from nanoinfer import LLM
from nanoinfer.gguf.header import read_header
from nanoinfer.hub import find_model
from nanoinfer.layers.embedding import QuantizedEmbedding
from nanoinfer.weights import sources
from nanoinfer.weights.formats.experts import Experts
from nanoinfer.weights.formats.gguf import FORMATS
from nanoinfer.weights.formats.groups import store
from nanoinfer.weights.formats.groups.experts import GroupExperts
from nanoinfer.weights.formats.groups.matrix import GroupMatrix
from nanoinfer.weights.formats.matrix import Matrix
from nanoinfer.weights.formats.plain.experts import PlainExperts

pytestmark = pytest.mark.usefixtures("one_thread")

MakeLLM = Callable[..., LLM]
Write = Callable[..., tuple[str, PreTrainedModel]]
OPTIONS: dict[str, Any] = {"device": "cpu", "kvcache_block_size": 16, "max_model_len": 320}
SCALED = {**LLAMA3, "original_max_position_embeddings": 8192, "rope_theta": 500000.0}
WINDOWS = {"sliding_window": 24, "query_pre_attn_scalar": 16}
EXPERTS_OF_LATENTS = {**CASES["glm4moelite"].settings, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
NO_BIASES = {"attention_bias": False, "mlp_bias": False}
ONE_SCALE = {"mscale": 0.7, "mscale_all_dim": 0.7}  # the metadata have one for both
NEMOTRON_EXPERTS = {
    **CASES["nemotronh latents of experts in groups, biases"].settings,
    **{"layer_types": ["moe", "full_attention", "linear_attention", "moe"], "n_group": 1, "topk_group": 1},
}
MISTRAL = {**ONE_SCALE, **CASES["ministral3"].settings["rope_parameters"]}
FAMILIES = {  # of each architecture what the metadata can say
    "arcee": CASES["arcee"],
    "command-r": CASES["cohere"],
    "command-r head norms": CASES["cohere head norms"],
    "cohere2": CASES["cohere2"],
    "deepseek2": CASES["deepseek-v3"],
    "deepseek2 without corrections": CASES["deepseek-v2"],
    "deepseek2 groups by their largest": Case(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        {**CASES["deepseek-v2 groups, biases"].settings, **NO_BIASES, "rope_parameters": {**YARN, **ONE_SCALE}},
    ),
    "deepseek2 as GLM-4.7-Flash": Case("Glm4MoeLiteForCausalLM", "glm4_moe_lite", EXPERTS_OF_LATENTS),
    "dots1": CASES["dots1"],
    "ernie4.5": CASES["ernie4.5"],
    "ernie4.5moe": CASES["ernie4.5moe"],
    "exaone4": CASES["exaone4 windows by a pattern"],
    "exaone4 without windows": CASES["exaone4 without windows"],
    "gemma": CASES["gemma"],
    "gemma2": Case("Gemma2ForCausalLM", "gemma2", WINDOWS),
    "gemma3": Case("Gemma3ForCausalLM", "gemma3_text", {**WINDOWS, "num_hidden_layers": 6}),
    "gemma4": CASES["gemma4"],
    "gemma4 layer inputs": CASES["gemma4 layer inputs"],
    "gemma4 heads of one size": CASES["gemma4 heads of one size"],
    "gemma4 cap, fewer heads": CASES["gemma4 cap, fewer heads"],
    "gemma4 experts": CASES["gemma4 experts"],
    "glm4": CASES["glm4"],
    "glm4moe": CASES["glm4moe"],
    "glm4moe groups": CASES["glm4moe groups, biases, norms, two dense layers"],
    "gpt-oss": CASES["gptoss"],
    "granite": CASES["granite"],
    "granitehybrid": CASES["granitemoehybrid"],
    "granitehybrid experts": CASES["granitemoehybrid experts, rotated"],
    "granitemoe": CASES["granitemoe"],
    "granitemoe shared": CASES["granitemoeshared"],
    "hunyuan-dense": CASES["hunyuandense"],
    "hunyuan-moe": CASES["hunyuanmoe"],
    "lfm2": replace(CASES["lfm2"], settings={**CASES["lfm2"].settings, "block_auto_adjust_ff_dim": False}),
    "lfm2moe": replace(CASES["lfm2moe"], settings={**CASES["lfm2moe"].settings, "routed_scaling_factor": 1.0}),
    "llama": CASES["llama"],
    "llama tied, linear rope": CASES["llama tied, linear rope"],
    "llama biases, llama3 rope": Case("LlamaForCausalLM", "llama", {"attention_bias": True, "rope_parameters": SCALED}),
    "minimax-m2": CASES["minimax-m2"],
    "mistral": CASES["mistral"],
    "mistral3": CASES["mistral"],
    "mistral3 larger queries": Case("Ministral3ForCausalLM", "ministral3", {"rope_parameters": MISTRAL}),
    "mixtral": CASES["mixtral"],
    "nemotron": CASES["nemotron"],
    "nemotron_h": CASES["nemotronh"],
    "nemotron_h_moe": Case("NemotronHForCausalLM", "nemotron_h", NEMOTRON_EXPERTS, keeps_states=True),
    "olmo2": CASES["olmo2"],
    "olmo2 windows": CASES["olmo3"],
    "olmoe": CASES["olmoe"],
    "phi3": CASES["phi3"],
    "phi3 longrope": CASES["phi3 longrope"],
    "phi3 without windows": Case("Phi3ForCausalLM", "phi3", {"sliding_window": None}),
    "qwen2": CASES["qwen2"],
    "qwen2 yarn": Case("Qwen2ForCausalLM", "qwen2", {"rope_parameters": YARN}),
    "qwen2vl": CASES["qwen2"],
    "qwen2moe": Case("Qwen2MoeForCausalLM", "qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 40}),
    "qwen3": CASES["qwen3"],
    "qwen3moe": CASES["qwen3moe"],
    "qwen3next": replace(CASES["qwen3next"], settings={**CASES["qwen3next"].settings, "mlp_only_layers": []}),
    "qwen3vl": CASES["qwen3"],
    "qwen3vlmoe": CASES["qwen3moe"],
    "qwen3.5": CASES["qwen3.5"],
    "qwen3.5moe": CASES["qwen3.5moe"],
    "seedoss": CASES["seedoss"],
    "smollm3": CASES["smollm3"],
    "starcoder2": CASES["starcoder2"],
}
RENAMED = "mistral3", "nemotron_h_moe", "qwen2vl", "qwen3vl", "qwen3vlmoe"  # of classes that others name, too


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a case's GGUF file; returns its path, and transformers' model of what it stands for."""

    def write(
        case: Case, types: Types = plain, architecture: str | None = None, **metadata: Any
    ) -> tuple[str, PreTrainedModel]:
        build(case, tmp_path / "source")
        file = tmp_path / "model.gguf"
        write_gguf(tmp_path / "source", file, types, metadata, architecture=architecture)
        return str(file), AutoModelForCausalLM.from_pretrained(tmp_path / "source").eval()

    return write


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_gives_what_its_weights_give(name: str, write: Write, make_llm: MakeLLM) -> None:
    no_window = {"attention.sliding_window": 0} if "without windows" in name else {}  # as the converter writes it
    architecture = next((own for own in RENAMED if own in name.split()), None)
    file, model = write(FAMILIES[name], architecture=architecture, **no_window)
    run(make_llm(file, device="cpu", **FAMILIES[name].small), model, prompt_logprobs=0)


WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
TYPES = ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


@pytest.mark.parametrize("kind", [*TYPES, "IQ4_NL", "IQ4_XS"])
def test_numbers_of_every_type(kind: str, write: Write, make_llm: MakeLLM) -> None:
    file, model = write(Case("LlamaForCausalLM", "llama", WIDE), in_type(kind))
    run(make_llm(file, **OPTIONS), model, prompt_logprobs=0)


def test_types_that_mix(write: Write, make_llm: MakeLLM) -> None:
    """As in Q4_K_M, where values have more bits than queries and keys, and rows that no block fits have others."""
    kinds = {"attn_v": "Q6_K", "ffn_down": "Q5_0", "token_embd": "Q8_0", "blk.1.ffn_gate": "Q6_K"}

    def mixed(name: str, shape: tuple[int, ...]) -> str:
        kind = next((kind for part, kind in kinds.items() if part in name), "Q4_K")
        return in_type(kind)(name, shape)

    file, model = write(Case("Qwen3ForCausalLM", "qwen3", {**WIDE, "intermediate_size": 96}), mixed)
    run(make_llm(file, **OPTIONS), model)


def test_value_heads_whose_columns_keep_their_bits(write: Write, make_llm: MakeLLM) -> None:
    """The file has the columns of the last product in another order, and a layer that guesses, which is not read."""
    case = CASES["qwen3.5"]
    wide = {"hidden_size": 64, "intermediate_size": 96, "linear_value_head_dim": 32}
    case = replace(case, settings={**case.settings, **wide})
    file, model = write(case, in_type("Q8_0"), block_count=5, nextn_predict_layers=1)
    llm = make_llm(file, device="cpu", **case.small)
    out = next(matrix for name, matrix in matrices_of(llm).items() if name.endswith("layers.0.mixer.out_proj.matrix"))
    assert isinstance(out, GroupMatrix)
    assert torch.equal(out.store.dense(torch.float32), model.model.layers[0].linear_attn.out_proj.weight)
    run(llm, model)


@pytest.mark.parametrize("name", ["qwen3moe", "mixtral"])
def test_experts_on_two_ranks(name: str, write: Write, make_llm: MakeLLM) -> None:
    case = FAMILIES[name]
    wide = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 96}
    file, model = write(replace(case, settings={**case.settings, **wide}), in_type("Q8_0"))
    run(make_llm(file, **OPTIONS, tensor_parallel_size=2), model)


@pytest.mark.parametrize("name", ["qwen3moe", "mixtral"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_of_two_types(
    name: str, ranks: int, write: Write, make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in Q4_K_M, where downs have more bits."""
    monkeypatch.setattr(store, "may_keep", lambda *shape: False)
    case = FAMILIES[name]
    wide = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 2}

    def mixed(name: str, shape: tuple[int, ...]) -> str:
        return in_type("Q6_K" if "ffn_down" in name else "Q4_K")(name, shape)

    file, model = write(replace(case, settings={**case.settings, **wide}), mixed)
    llm = make_llm(file, **OPTIONS, tensor_parallel_size=ranks)
    experts = [module for module in modules_of(llm).values() if isinstance(module, GroupExperts)]
    assert len(experts) == 2
    assert [store.layout.numbers for store in (experts[0].gate_up, experts[0].down)] == ["int4", "int6"]
    run(llm, model)


GPT_OSS = {**CASES["gptoss"].settings, "hidden_size": 64, "num_hidden_layers": 2}


@pytest.mark.parametrize("types", [("MXFP4", "MXFP4"), ("Q4_0", "Q8_0"), ("Q8_0", "F16")], ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_with_biases(
    ranks: int, types: tuple[str, str], write: Write, make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As gpt-oss has them; a checkpoint has each gate beside its up, and each matrix the other way round."""
    monkeypatch.setattr(store, "may_keep", lambda *shape: False)
    above, down = types

    def mixed(name: str, shape: tuple[int, ...]) -> str:
        return in_type(down if "ffn_down" in name else above)(name, shape) if "_exps.weight" in name else "F32"

    file, model = write(Case("GptOssForCausalLM", "gpt_oss", GPT_OSS), mixed)
    llm = make_llm(file, **OPTIONS, tensor_parallel_size=ranks)
    kinds = {type(module) for module in modules_of(llm).values() if isinstance(module, Experts)}
    assert kinds == ({PlainExperts} if down == "F16" else {GroupExperts})
    run(llm, model)


@pytest.mark.parametrize("name", ["granitemoe shared", "gemma4 experts", "qwen3next", "nemotron_h_moe", "lfm2moe"])
def test_tensors_that_a_file_has_otherwise_keep_their_bits(
    name: str, write: Write, make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "may_keep", lambda *shape: False)
    shared = "shared_intermediate_size" if "granite" in name else "shared_expert_intermediate_size"
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, shared: 32}
    case = FAMILIES[name]
    settings = {**case.settings, **sizes, **({"moe_latent_size": None} if "nemotron" in name else {})}
    file, model = write(
        replace(case, settings=settings), in_type("Q8_0"), "nemotron_h_moe" if "nemotron" in name else None
    )
    llm = make_llm(file, device="cpu", **case.small)
    modules = modules_of(llm)
    assert any(isinstance(module, GroupExperts) for module in modules.values())
    assert not any(isinstance(module, PlainExperts) for module in modules.values())
    assert any("shared" in name or "mixer" in name for name in modules if isinstance(modules[name], GroupMatrix)) or (
        "gemma4" in name
    )
    run(llm, model)


def test_a_split_file_by_its_first(tmp_path: Path, make_llm: MakeLLM) -> None:
    build(CASES["llama"], tmp_path / "source")
    write_gguf(tmp_path / "source", tmp_path / "model.gguf", split=20)
    first, *others = sorted(tmp_path.glob("*.gguf"))
    assert [file.name for file in others] == ["model-00002-of-00002.gguf"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    run(make_llm(str(first), **OPTIONS), model)
    with pytest.raises(ValueError, match=r"00002\.gguf: is a later part of a split file: give the first"):
        make_llm(str(others[0]), **OPTIONS)
    others[0].unlink()
    with pytest.raises(ValueError, match=r"00001-of-00002\.gguf: its part model-00002-of-00002\.gguf is not there"):
        make_llm(str(first), **OPTIONS)


def test_a_file_in_a_folder(tmp_path: Path, write: Write, make_llm: MakeLLM) -> None:
    file, model = write(CASES["qwen3"])
    run(make_llm(str(tmp_path), gguf_file="model.gguf", **OPTIONS), model)
    with pytest.raises(ValueError, match=r"no config\.json; for its GGUF file, give gguf_file='model\.gguf'"):
        make_llm(str(tmp_path), **OPTIONS)
    with pytest.raises(ValueError, match=r"gguf_file='other\.gguf': must be one of the GGUF files .*: model\.gguf"):
        make_llm(str(tmp_path), gguf_file="other.gguf", **OPTIONS)
    with pytest.raises(ValueError, match=r"gguf_file='model\.gguf': must be left out, as model=.* is a file itself"):
        make_llm(file, gguf_file="model.gguf", **OPTIONS)
    with pytest.raises(ValueError, match=r"gguf_file='model': must be the name of a file that ends with \.gguf"):
        make_llm(str(tmp_path), gguf_file="model", **OPTIONS)


def test_a_hub_id_and_a_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(hub_id: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((hub_id, revision, [pattern for pattern in allow_patterns if pattern.endswith(".gguf")]))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for name in ("M-Q4_K_M.gguf", "M-UD-Q4_K_M.gguf", "M-Q4_K.gguf", "Q8_0/M-Q8_0-00001-of-00002.gguf"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert find_model("model", "owner/m-GGUF:q8_0", "v1") == str(tmp_path / "Q8_0/M-Q8_0-00001-of-00002.gguf")
    assert find_model("model", "owner/m-GGUF:Q4_K", None) == str(tmp_path / "M-Q4_K.gguf")
    assert find_model("model", "owner/m-GGUF", None, "M-Q4_K.gguf") == str(tmp_path / "M-Q4_K.gguf")
    assert asked == [
        ("owner/m-GGUF", "v1", ["*Q8_0*.gguf", "*q8_0*.gguf"]),
        ("owner/m-GGUF", None, ["*Q4_K*.gguf", "*q4_k*.gguf"]),
        ("owner/m-GGUF", None, ["M-Q4_K.gguf"]),
    ]
    with pytest.raises(
        ValueError, match=r"model='owner/m-GGUF:Q9': must be one of the GGUF files that are there: M-Q4_K"
    ):
        find_model("model", "owner/m-GGUF:Q9", None)


def test_a_config_beside_the_file(tmp_path: Path, write: Write, make_llm: MakeLLM) -> None:
    """Metadata do not say that windows are in use; a config.json does."""
    settings = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}
    file, model = write(Case("Qwen2ForCausalLM", "qwen2", settings))
    run(make_llm(file, hf_config_path=str(tmp_path / "source"), **OPTIONS), model)


def test_the_config_of_a_multimodal_original(tmp_path: Path, write: Write, make_llm: MakeLLM) -> None:
    """The file has its language model, which runs as text alone."""
    file, model = write(FAMILIES["gemma3"])
    folder = tmp_path / "original"
    folder.mkdir()
    text = json.loads((tmp_path / "source" / "config.json").read_text())
    settings = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    (folder / "config.json").write_text(json.dumps(settings))
    run(make_llm(file, hf_config_path=str(folder), **OPTIONS), model)


def test_other_weights_from_a_file(tmp_path: Path, write: Write, make_llm: MakeLLM) -> None:
    file, model = write(CASES["llama"])
    build(CASES["llama"], tmp_path / "first")
    llm = make_llm(str(tmp_path / "first"), **OPTIONS)
    llm.load_weights(file)
    run(llm, model)


def test_the_log_says_what_became_numbers(write: Write, make_llm: MakeLLM, caplog: pytest.LogCaptureFixture) -> None:
    """The embedding does here, and no other matrix."""

    def mixed(name: str, shape: tuple[int, ...]) -> str:
        return in_type("Q2_K" if "token_embd" in name else "Q8_0")(name, shape)

    file, _ = write(Case("LlamaForCausalLM", "llama", {**WIDE, "vocab_size": 16000}), mixed)
    with caplog.at_level("INFO", "nanoinfer"):
        make_llm(file, **OPTIONS)
    assert (
        f"{file}: tensors in Q2_K became numbers of float32: they take 0.016 GB, and 0.001 GB in the file"
        in caplog.text
    )


def test_numbers_that_do_not_fit(write: Write, make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused before they are read, with what they need and what is free."""
    monkeypatch.setattr(sources, "free_bytes", lambda: 10**6)
    file, _ = write(Case("LlamaForCausalLM", "llama", WIDE), in_type("Q3_K"))
    message = r"tensors in Q3_K become numbers of float32: they take 0\.\d+ GB, and 0\.001 GB are free; a file in Q4_K"
    with pytest.raises(ValueError, match=rf"model\.gguf: {message}"):
        make_llm(file, **OPTIONS)


def matrices_of(llm: LLM) -> dict[str, Matrix]:
    return {name: module for name, module in modules_of(llm).items() if isinstance(module, Matrix)}


def modules_of(llm: LLM) -> dict[str, nn.Module]:
    return dict(llm.engine.ranks.runner.steps.model.named_modules())


@pytest.mark.parametrize("kind", FORMATS)
def test_types_that_stay_in_their_bits(
    kind: str, write: Write, make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each code and each scale is the file's, also where the CPU has no room for the numbers of the dtype."""
    monkeypatch.setattr(store, "may_keep", lambda *shape: False)
    settings = {**WIDE, "head_dim": 64, "tie_word_embeddings": False}  # a block of some types has 256 inputs
    file, model = write(Case("LlamaForCausalLM", "llama", settings), in_type(kind))
    llm = make_llm(file, **OPTIONS)
    matrices = matrices_of(llm)
    assert len(matrices) == 10  # the embedding's, the head's and four of each layer
    assert all(isinstance(matrix, GroupMatrix) and matrix.store.label == kind for matrix in matrices.values())
    gate_up = next(matrix for name, matrix in matrices.items() if name.endswith("layers.0.mlp.gate_up_proj.matrix"))
    mlp = model.model.layers[0].mlp
    assert torch.equal(gate_up.store.dense(torch.float32), torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
    run(llm, model)


@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 2}, *whole_only([{"deterministic": True}])], ids=str)
def test_a_matrix_of_two_types(options: dict[str, Any], write: Write, make_llm: MakeLLM) -> None:
    """Queries, keys and values are one matrix here; so are gates and ups. Each keeps its type."""
    kinds = {"attn_v": "Q6_K", "attn_k": "F16", "ffn_down": "Q4_0", "ffn_gate": "Q5_K"}

    def mixed(name: str, shape: tuple[int, ...]) -> str:
        return in_type(next((kind for part, kind in kinds.items() if part in name), "Q4_K"))(name, shape)

    settings = {**WIDE, "head_dim": 64, "attention_bias": True, "tie_word_embeddings": True}
    file, model = write(Case("LlamaForCausalLM", "llama", settings), mixed)
    llm = make_llm(file, **OPTIONS, **options)
    found = [
        (name.partition("_proj.matrix")[0].split(".")[-1], matrix.store.label)
        for name, matrix in matrices_of(llm).items()
        if isinstance(matrix, GroupMatrix) and ".0." in name
    ]
    assert found == [
        ("qkv", "Q4_K"), ("qkv", "Q6_K"), ("o", "Q4_K"),
        ("gate_up", "Q5_K"), ("gate_up", "Q4_K"), ("down", "Q4_0"),
    ]  # fmt: skip
    run(llm, model)


@pytest.mark.parametrize("kind", ["Q6_K", "Q4_K", "Q8_0"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_embedding_that_is_the_head_too(
    ranks: int, kind: str, write: Write, make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its vectors are looked up in their bits, and an update under either name is rounded."""
    monkeypatch.setattr(store, "may_keep", lambda *shape: False)
    settings = {**WIDE, "vocab_size": 301, "tie_word_embeddings": True}
    file, model = write(Case("LlamaForCausalLM", "llama", settings), in_type(kind))
    llm = make_llm(file, **OPTIONS, tensor_parallel_size=ranks)
    head = modules_of(llm)["inputs.embedding"]
    assert isinstance(head, QuantizedEmbedding)
    assert head.matrix.store.label == kind
    assert "lm_head" not in modules_of(llm)  # as it is the same module
    run(llm, model)
    prompts, weights = [[5], [7, 8]], model.state_dict()
    weight, updates = weights.pop("lm_head.weight").flip(0), []
    del weights["model.embed_tokens.weight"]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        llm.load_weights(file)
        llm.update_weights([(name, weight), *weights.items()])
        updates.append([output.token_ids for output in llm.generate(prompts, greedy(4), use_tqdm=False)])
    assert updates[0] == updates[1]


def test_an_adapter_beside_a_quantized_embedding(tmp_path: Path, write: Write, make_llm: MakeLLM) -> None:
    """And beside matrices of two types."""

    def mixed(name: str, shape: tuple[int, ...]) -> str:
        return in_type("Q6_K" if "attn_v" in name else "Q4_K")(name, shape)

    file, _ = write(Case("LlamaForCausalLM", "llama", {**WIDE, "head_dim": 64, "tie_word_embeddings": True}), mixed)
    tuned, prompt = Tuned(str(tmp_path / "source"), seed=1), list(range(20, 60))
    llm = make_llm(file, **OPTIONS, max_adapters=1)
    llm.load_adapter("red", tuned.tensors, alpha=ALPHA)
    (output,) = llm.generate([prompt], greedy(12, adapter="red", ignore_eos=True), use_tqdm=False)
    assert output.token_ids == tuned.greedy(prompt, 12, ignore_eos=True)


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K"])
def test_a_minimum_that_is_infinite(kind: str, write: Write, make_llm: MakeLLM) -> None:
    file, _ = write(Case("LlamaForCausalLM", "llama", {**WIDE, "head_dim": 64}), in_type(kind))
    entry = read_header(file).entries["blk.1.ffn_up.weight"]
    content = bytearray(Path(file).read_bytes())
    content[entry.offset + 2 : entry.offset + 4] = np.float16(np.inf).tobytes()
    Path(file).write_bytes(content)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight_minima has numbers that are NaN or inf"):
        make_llm(file, **OPTIONS)


def test_a_quantized_file_is_quantized(write: Write, make_llm: MakeLLM) -> None:
    file, _ = write(Case("LlamaForCausalLM", "llama", WIDE), in_type("Q8_0"))
    with pytest.raises(ValueError, match="quantization='int4': the checkpoint's matrices are in Q8_0 already"):
        make_llm(file, quantization="int4", **OPTIONS)


def test_an_update_of_plain_tensors_is_rounded(tmp_path: Path, write: Write, make_llm: MakeLLM) -> None:
    """And a file in the same type is not."""
    file, model = write(Case("LlamaForCausalLM", "llama", WIDE), in_type("Q8_0"))
    llm = make_llm(file, **OPTIONS)
    before = [output.token_ids for output in llm.generate([[5], [7, 8]], greedy(4), use_tqdm=False)]
    llm.update_weights([(name, -tensor) for name, tensor in model.state_dict().items()])
    llm.load_weights(file)
    assert [output.token_ids for output in llm.generate([[5], [7, 8]], greedy(4), use_tqdm=False)] == before


def test_a_tensor_that_the_model_lacks(tmp_path: Path, write: Write, make_llm: MakeLLM) -> None:
    """It is named, as the file calls it."""
    build(CASES["qwen3"], tmp_path / "source")
    weights = load_file(tmp_path / "source" / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    save_file(weights, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    write_gguf(tmp_path / "source", tmp_path / "model.gguf")
    with pytest.raises(ValueError, match=r"the checkpoint does not fit the model:.* unknown: blk\.0\.attn_q\.bias"):
        make_llm(str(tmp_path / "model.gguf"), hf_config_path=str(tmp_path / "source"), **OPTIONS)
