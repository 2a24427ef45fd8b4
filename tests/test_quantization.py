"""Weights in FP8: checkpoints of both kinds, and others that are quantized as they load."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, build
from conftest import Oracle, greedy, whole_only
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanoinfer import BUNDLED_MODEL, LLM
from nanoinfer.kernels.fp8 import FP8, LARGEST
from nanoinfer.weights.formats import made
from nanoinfer.weights.formats.fp8.format import Fp8Format
from nanoinfer.weights.formats.fp8.store import Fp8Store
from nanoinfer.weights.formats.table import read_formats
from nanoinfer.weights.shards import Section

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = {"device": "cpu", "kvcache_block_size": 16, "max_model_len": 160}
PROMPTS = [[7], list(range(20, 60)), [5, 6] * 30]
TOKENS = 5
Tensors = dict[str, Tensor]

FP8_CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
SMALL_BLOCKS = {**FP8_CONFIG, "weight_block_size": [32, 16]}
ONE_SCALE = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}


def compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, **weights},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", r"re:.*mlp\.gate$"],
    }


CONFIGS = {
    "blocks": FP8_CONFIG,
    "small blocks": SMALL_BLOCKS,
    "one scale": ONE_SCALE,
    "channels": compressed("channel"),
    "tensors": compressed("tensor"),
    "compressed blocks": compressed("block", block_structure=[64, 32]),
}
MATRICES = (  # the ends of the names of quantized matrices
    "_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight", ".in_proj_qkv.weight", ".in_proj_z.weight",
    ".in_proj_qkvz.weight", ".kv_a_proj_with_mqa.weight",
)  # fmt: skip


def quantize(weight: Tensor, format: Fp8Format) -> tuple[Tensor, Tensor, Tensor]:
    """Return a matrix in FP8, its scales as a checkpoint has them, and the matrix that these stand for."""
    height, width = (own or size for own, size in zip(format.block, weight.shape, strict=True))
    rows, columns = (math.ceil(size / own) for size, own in zip(weight.shape, (height, width), strict=True))
    scales = torch.empty(rows, columns)
    in_fp8, dense = torch.empty_like(weight, dtype=FP8), torch.empty_like(weight, dtype=torch.float32)
    for row in range(rows):
        for column in range(columns):
            block = slice(row * height, (row + 1) * height), slice(column * width, (column + 1) * width)
            scales[row, column] = weight[block].abs().max() / LARGEST
            in_fp8[block] = (weight[block] / scales[row, column]).to(FP8)
            dense[block] = in_fp8[block].float() * scales[row, column]
    return in_fp8, scales.flatten() if format.block == (None, None) else scales, dense


def write_checkpoint(source: Path, target: Path, config: dict[str, Any]) -> Path:
    """Write a checkpoint in FP8 to `target`, and beside it, in "dense", what it stands for."""
    dense = target / "dense"
    dense.mkdir()
    settings = json.loads((source / "config.json").read_text())
    (dense / "config.json").write_text(json.dumps(settings))
    (target / "config.json").write_text(json.dumps({**settings, "quantization_config": config}))
    formats = read_formats(type("Config", (), {"quantization_config": config})())
    stored: Tensors = {}
    plain: Tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        plain[name] = stored[name] = tensor
        format = formats.of(module)
        if name.endswith(MATRICES) and tensor.dim() == 2 and isinstance(format, Fp8Format):
            stored[name], stored[f"{module}.{format.scale}"], plain[name] = quantize(tensor.float(), format)
            if config.get("activation_scheme") == "static":
                stored[f"{module}.input_scale"] = torch.tensor(0.5)
    save_file(stored, target / "model.safetensors", {"format": "pt"})
    save_file(plain, dense / "model.safetensors", {"format": "pt"})
    return dense


def tokens_of(llm: LLM) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, greedy(TOKENS, ignore_eos=True), use_tqdm=False)]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """Writes a family's checkpoint in FP8, and what it stands for; returns both folders."""

    def write(family: str, config: dict[str, Any], name: str = "fp8") -> tuple[str, str]:
        build(CASES[family], tmp_path / name / "source")
        return str(tmp_path / name), str(write_checkpoint(tmp_path / name / "source", tmp_path / name, config))

    return write


@pytest.mark.parametrize("ranks", [1, *whole_only([2])])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("family", [*whole_only(["qwen3", "phi3", "nemotronh experts"]), "qwen3moe"])
def test_a_checkpoint_gives_the_tokens_of_what_it_stands_for(
    family: str, config: dict[str, Any], ranks: int, write: Callable[..., tuple[str, str]], make_llm: Callable[..., LLM]
) -> None:
    folder, dense = write(family, config)
    oracle = Oracle(dense)
    llm = make_llm(folder, **{**OPTIONS, **CASES[family].small}, tensor_parallel_size=ranks)
    assert tokens_of(llm) == [oracle.greedy(prompt, TOKENS, ignore_eos=True) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("family", "config"),
    [
        *whole_only(
            [
                ("qwen3moe", "channels"),
                ("llama biases, llama3 rope", "small blocks"),
                ("phi3", "compressed blocks"),
                ("mixtral", "one scale"),
            ]
        ),
    ],
)
def test_ranks_have_the_bits_of_one(
    family: str, config: str, write: Callable[..., tuple[str, str]], make_llm: Callable[..., LLM]
) -> None:
    """With deterministic=True, also after an update of the weights."""
    folder, dense = write(family, CONFIGS[config])
    params, prompts = greedy(4, ignore_eos=True, logprobs=2, prompt_logprobs=1), [[7], list(range(20, 32)), [5, 6] * 5]
    results = []
    for ranks in (1, 2):
        llm = make_llm(folder, **OPTIONS, deterministic=True, tensor_parallel_size=ranks)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        llm.update_weights((name, 1.1 * tensor) for name, tensor in load_file(f"{dense}/model.safetensors").items())
        outputs += llm.generate(prompts, params, use_tqdm=False)
        results.append([(output.token_ids, output.logprobs, output.prompt_logprobs) for output in outputs])
        assert results[-1][0] != results[-1][len(prompts)]
    assert results[0] == results[1]


@pytest.mark.parametrize(
    "family",
    [
        "glm4", "qwen3.5",
        *whole_only(["llama biases, llama3 rope", "gemma3", "olmo2", "mixtral", "qwen2moe", "qwen3next", "lfm2"]),
        *whole_only(["glm4moe groups, biases, norms, two dense layers", "minimax-m2", "hy3", "gemma4unified"]),
        *whole_only(["mimo-v2"]),
    ],
)  # fmt: skip
def test_families(family: str, write: Callable[..., tuple[str, str]], make_llm: Callable[..., LLM]) -> None:
    folder, dense = write(family, SMALL_BLOCKS)
    oracle = Oracle(dense)
    llm = make_llm(folder, **{**OPTIONS, **CASES[family].small})
    assert tokens_of(llm) == [oracle.greedy(prompt, TOKENS, ignore_eos=True) for prompt in PROMPTS]


def test_multimodal_checkpoints(write: Callable[..., tuple[str, str]], make_llm: Callable[..., LLM]) -> None:
    config = {**SMALL_BLOCKS, "modules_to_not_convert": ["model.visual", "lm_head"]}
    folder, dense = write("qwen3-vl", config)
    assert tokens_of(make_llm(folder, **OPTIONS)) == tokens_of(make_llm(dense, **OPTIONS))


class TestOnTheFly:
    """A checkpoint of other numbers is quantized as it loads, in blocks of 128 x 128."""

    @pytest.mark.parametrize("ranks", [*whole_only([1]), 2])
    @pytest.mark.parametrize("family", ["qwen3", *whole_only(["qwen3moe"])])
    def test_it_gives_the_tokens_of_a_checkpoint_in_fp8(
        self, family: str, ranks: int, write: Callable[..., tuple[str, str]], make_llm: Callable[..., LLM]
    ) -> None:
        folder, _ = write(family, FP8_CONFIG)
        options = {**OPTIONS, "tensor_parallel_size": ranks}
        expected = tokens_of(make_llm(folder, **OPTIONS))
        assert tokens_of(make_llm(f"{folder}/source", **options, quantization="fp8")) == expected
        assert tokens_of(make_llm(folder, **options, quantization="fp8")) == expected

    def test_random_weights(self, make_llm: Callable[..., LLM]) -> None:
        llm = make_llm(load_format="dummy", quantization="fp8", **OPTIONS)
        matrix = llm.engine.ranks.runner.steps.model.layers[0].mlp.gate_up_proj.matrix
        assert matrix.store.weight.dtype == FP8
        assert matrix.store.dense(torch.float32).std() == pytest.approx(0.02, rel=0.02)
        assert tokens_of(llm)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.multi_gpu)])
@pytest.mark.parametrize(
    ("family", "eager"), [("qwen3", True), ("qwen3moe", False), *whole_only([("qwen3", False), ("qwen3moe", True)])]
)
def test_gpus_give_the_tokens_of_the_cpu(
    family: str, eager: bool, ranks: int, write: Callable[..., tuple[str, str]], make_llm: Callable[..., LLM]
) -> None:
    folder, _ = write(family, SMALL_BLOCKS)
    options = {"kvcache_block_size": 16, "max_model_len": 160, "max_num_seqs": 4, "enforce_eager": eager}
    llm = make_llm(folder, **options, tensor_parallel_size=ranks)
    assert tokens_of(llm) == tokens_of(make_llm(folder, **OPTIONS))


class TestChanges:
    """Updates of weights that are in FP8 here."""

    @pytest.mark.parametrize("ranks", [1, *whole_only([2])])
    @pytest.mark.parametrize("family", [*whole_only(["qwen3", "phi3"]), "qwen3moe"])
    def test_updates_equal_a_fresh_start(
        self, family: str, ranks: int, write: Callable[..., tuple[str, str]], make_llm: Callable[..., LLM]
    ) -> None:
        folder, _ = write(family, SMALL_BLOCKS)
        source = load_file(f"{folder}/source/model.safetensors")
        options = {**OPTIONS, "quantization": "fp8", "tensor_parallel_size": ranks}
        llm = make_llm(f"{folder}/source", **options)
        before = tokens_of(llm)
        other = {name: tensor * (1 + 0.2 * torch.randn(tensor.shape)) for name, tensor in source.items()}
        llm.update_weights(other)
        changed = tokens_of(llm)
        assert changed != before
        save_file(other, f"{folder}/source/model.safetensors", {"format": "pt"})
        assert tokens_of(make_llm(f"{folder}/source", **options)) == changed
        llm.sleep(level=2)
        llm.wake_up()
        llm.update_weights(iter(source.items()))
        assert tokens_of(llm) == before

    @pytest.mark.parametrize("ranks", [*whole_only([1]), 2])
    def test_checkpoints_in_fp8(
        self, ranks: int, write: Callable[..., tuple[str, str]], make_llm: Callable[..., LLM]
    ) -> None:
        folder, dense = write("qwen3", CONFIGS["channels"])
        llm = make_llm(folder, **OPTIONS, tensor_parallel_size=ranks)
        expected = tokens_of(llm)
        llm.load_weights(f"{folder}/source")
        assert tokens_of(llm)
        llm.load_weights(folder)
        assert tokens_of(llm) == expected
        llm.load_weights(dense)
        assert tokens_of(llm) == expected  # numbers that are in FP8 already stay what they are
        stored = load_file(f"{folder}/model.safetensors")
        llm.update_weights(dict(reversed(stored.items())))
        assert tokens_of(llm) == expected
        name = "model.layers.1.mlp.down_proj.weight"
        with pytest.raises(ValueError, match=f"missing: {name}_scale"):
            llm.update_weights({name: stored[name]}, partial=True)
        some = {key: stored[key] for key in (name, f"{name}_scale")}
        llm.update_weights(some, partial=True)
        assert tokens_of(llm) == expected


class TestBadInput:
    @pytest.mark.parametrize(
        ("config", "message"),
        [
            (
                {"quant_method": "hqq", "quant_config": {}},
                "quantization_config=.*'hqq'.* is not supported; supported are 'fp8'.*; convert it with",
            ),
            ({**FP8_CONFIG, "weight_block_size": [0, 128]}, r"weight_block_size=\[0, 128\]: must be two integers"),
            ({**FP8_CONFIG, "weight_block_size": 128}, "weight_block_size=128: must be two integers"),
            ({**FP8_CONFIG, "fmt": "e5m2"}, "fmt='e5m2': must be 'e4m3'"),
            (compressed("group"), "strategy='group': must be 'tensor', 'channel' or 'block'"),
            (compressed("channel", num_bits=4), "must be 8-bit floats"),
            (compressed("channel", type="int"), "must be 8-bit floats"),
            ({**FP8_CONFIG, "modules_to_not_convert": ["q_proj"]}, "k_proj is in FP8 and .*q_proj not: must be both"),
        ],
    )
    def test_configs(self, config: dict[str, Any], message: str, tmp_path: Path) -> None:
        build(CASES["qwen3"], tmp_path)
        settings = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**settings, "quantization_config": config}))
        with pytest.raises(ValueError, match=message):
            LLM(str(tmp_path), **OPTIONS)

    def test_scales(self, write: Callable[..., tuple[str, str]]) -> None:
        folder, _ = write("qwen3", SMALL_BLOCKS)
        file = Path(folder) / "model.safetensors"
        tensors = load_file(file)
        name = "model.layers.1.mlp.down_proj.weight_scale_inv"
        shape = list(tensors[name].shape)
        for changed, message in (
            ({name: None}, f"missing: {name}"),
            ({name: tensors[name][:, :1].contiguous()}, rf"{name} has shape .*, but the model needs \[{shape[0]}, "),
            ({name: tensors[name] * math.nan}, f"{name} has numbers that are NaN or infinite"),
            ({"lm_head.weight": tensors["lm_head.weight"].to(FP8)}, "lm_head.weight has numbers of type F8_E4M3"),
        ):
            some = {key: tensor for key, tensor in {**tensors, **changed}.items() if tensor is not None}
            save_file(some, file, {"format": "pt"})
            with pytest.raises(ValueError, match=message):
                LLM(folder, **OPTIONS)

    def test_options(self) -> None:
        with pytest.raises(ValueError, match="quantization='int3': must be one of 'fp8', 'int4', 'int8', 'mxfp4'"):
            LLM(BUNDLED_MODEL, quantization="int3")


def test_a_number_is_off_by_no_more_than_the_format_allows() -> None:
    """Blocks are cut where a checkpoint's begin and where the next section begins. A section's share few scales."""
    sections = [Section("a", 160, (320, 96), 160), Section("b", 64, (64, 96), 0)]
    store = Fp8Store(sections, 96, Fp8Format())
    assert store.block == (32, 96)
    weight = torch.randn(224, 96) * torch.exp2(torch.randint(-6, 6, (224, 1)))
    for part in store.parts:
        section = torch.zeros(320, 96)
        section[part.own[0].start : part.own[0].stop] = weight[part.rows]
        part.copy_(section[part.cover[0].start : part.cover[0].stop])
    error = (store.dense(torch.float32) - weight).abs()
    blocks = weight.split([96, 64, 64])  # of the first, the checkpoint's second and third block of rows
    largest = torch.cat([block.abs().max().expand(len(block)) for block in blocks])[:, None]
    assert (error <= torch.maximum(weight.abs() / 16, largest / LARGEST / 1024) * 1.001).all()
    assert len(store.scales.unique()) == len(blocks)


@pytest.mark.parametrize("quantization", ["int8", *whole_only(["int4", "mxfp4"])])
def test_short_memory_costs_time_alone(
    quantization: str, make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The CPU keeps few bits as numbers of dtype, or makes these for each product; changed weights count with both."""

    def logprobs(is_short: bool) -> list[list[float]]:
        monkeypatch.setattr(made, "total_bytes", lambda: 2**60 if is_short else 0)
        made._tell.cache_clear()
        llm = make_llm(BUNDLED_MODEL, **OPTIONS, quantization=quantization)
        found = [told_by(llm)]
        weights, name = load_file(Path(BUNDLED_MODEL) / "model.safetensors"), "model.layers.1.mlp.down_proj.weight"
        llm.update_weights({**weights, name: weights[name].flip(0)}.items())
        return [*found, told_by(llm)]

    def told_by(llm: LLM) -> list[float]:
        outputs = llm.generate(PROMPTS, greedy(2, logprobs=0, ignore_eos=True), use_tqdm=False)
        return [next(iter(entry.values())) for output in outputs for entry in output.logprobs]

    with caplog.at_level("INFO", "nanoinfer"):
        ours, theirs = logprobs(is_short=False), logprobs(is_short=True)
    for own, other in zip(ours, theirs, strict=True):
        assert own == pytest.approx(other, abs=1e-4)
    assert ours[0] != pytest.approx(ours[1], abs=1e-2)
    assert "keeps weights of few bits in float32" in caplog.text
    assert "memory is too short" in caplog.text
