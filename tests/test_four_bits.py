"""Models in four and eight bits: checkpoints of every published layout, and others that are rounded as they load."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, build
from cases.layouts import MIXED, PUBLISHED, Published, Writer, compressed
from conftest import Oracle, greedy, whole_only
from safetensors.torch import load_file, save_file
from test_fp8 import of_tokens
from torch import Tensor

from nanoinfer import LLM, RequestOutput
from nanoinfer.weights.formats import table
from nanoinfer.weights.formats.groups.format import GroupFormat
from nanoinfer.weights.formats.groups.layout import Layout

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = {"device": "cpu", "kvcache_block_size": 16, "max_model_len": 160}
PROMPTS = [[7], list(range(20, 60)), [5, 6] * 30]
TOKENS = 5
SIZES = {"hidden_size": 64, "intermediate_size": 96}  # of which two ranks have 64 and 32 inputs: whole groups
Write = Callable[..., tuple[str, str]]
MakeLLM = Callable[..., LLM]


def tokens_of(llm: LLM) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, greedy(TOKENS, ignore_eos=True), use_tqdm=False)]


def writer_of(published: Published, name: str) -> Writer | None:
    """Return what writes a tensor in the format; None: it stays as it is."""
    module, ends = name.removesuffix(".weight"), ("_proj.weight", "_with_mqa.weight")
    if not name.endswith(ends) and not (name == "lm_head.weight" and published.has_head):
        return None
    return next((write for part, write in published.others.items() if part in module), published.write)


def write_checkpoint(source: Path, target: Path, published: Published) -> Path:
    """Write a checkpoint in a format to `target`, and beside it, in "dense", what it stands for."""
    dense = target / "dense"
    dense.mkdir()
    settings = json.loads((source / "config.json").read_text())
    (dense / "config.json").write_text(json.dumps(settings))
    (target / "config.json").write_text(json.dumps({**settings, "quantization_config": published.config}))
    stored, plain = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        stored[name] = plain[name] = tensor
        write = writer_of(published, name)
        if write is not None and tensor.dim() == 2:
            del stored[name]
            tensors, plain[name] = write(tensor.float())
            stored |= {f"{name.removesuffix('weight')}{end}": one for end, one in tensors.items()}
    save_file(stored, target / "model.safetensors", {"format": "pt"})
    save_file(plain, dense / "model.safetensors", {"format": "pt"})
    return dense


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a family's checkpoint in a format, and what it stands for; returns both folders."""

    def write(family: str, published: Published, **settings: Any) -> tuple[str, str]:
        case = CASES[family]
        build(replace(case, settings={**case.settings, **SIZES, **settings}), tmp_path / "source")
        return str(tmp_path), str(write_checkpoint(tmp_path / "source", tmp_path, published))

    return write


FIRST = ["int4 groups", "gptq act order with zeros", "awq", "modelopt", "mxfp4", "nf4 twice"]
ORDERED = [name for name in PUBLISHED if "order" in name and name not in FIRST]
TWO_RANKS = [(name, 2) for name in FIRST]
ONE_RANK = [(name, 1) for name in FIRST]


def without(kept: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return the other formats and numbers of ranks."""
    return [both for both in product(PUBLISHED, (1, 2)) if both not in kept]


@pytest.mark.parametrize(
    ("family", "name", "ranks"),
    [
        *(("qwen3", *both) for both in (*TWO_RANKS, (FIRST[0], 1))),
        *whole_only(("qwen3", *both) for both in without([*TWO_RANKS, (FIRST[0], 1)])),
        *whole_only(("llama biases, llama3 rope", *both) for both in TWO_RANKS),
        *whole_only(("phi3", *both) for both in ONE_RANK),
    ],
)
def test_a_checkpoint_gives_the_tokens_of_what_it_stands_for(
    family: str, name: str, ranks: int, write: Write, make_llm: MakeLLM
) -> None:
    folder, dense = write(family, PUBLISHED[name])
    oracle = Oracle(dense)
    llm = make_llm(folder, **OPTIONS, tensor_parallel_size=ranks)
    assert tokens_of(llm) == [oracle.greedy(prompt, TOKENS, ignore_eos=True) for prompt in PROMPTS]


def test_shares_that_no_group_cuts() -> None:
    """Two ranks cut groups of 128 into ones of 64, which kernels read, and groups of 32 not at all."""
    wide, narrow = (GroupFormat("int4", Layout("int4", group=group)) for group in (128, 32))
    assert [wide.inputs_together(size, 2) for size in (256, 384, 128)] == [1, 1, 1]
    assert [narrow.inputs_together(size, 2) for size in (64, 96, 80, 32)] == [1, 32, 1, 1]


EXPERTS = {"moe_intermediate_size": 96}
WITHOUT_GATES = {"moe_shared_expert_intermediate_size": 64, "mamba_head_dim": 16}


@pytest.mark.parametrize("ranks", [1, *whole_only([2])])
@pytest.mark.parametrize(
    "name",
    ["int4 with zeros", "gptq", *whole_only(["gptq act order", "awq", "nvfp4", "int8 groups", "nf4", "llm.int8"])],
)
def test_experts(name: str, ranks: int, write: Write, make_llm: MakeLLM) -> None:
    folder, dense = write("qwen3moe", PUBLISHED[name], **EXPERTS)
    llm = make_llm(folder, **OPTIONS, tensor_parallel_size=ranks)
    assert tokens_of(llm) == tokens_of(make_llm(dense, **OPTIONS))


@pytest.mark.parametrize("ranks", [1, *whole_only([2])])
@pytest.mark.parametrize(
    "name",
    [*whole_only(["int4 with zeros"]), "gptq", *whole_only(["gptq act order", "awq", "nvfp4", "mxfp4", "int8 groups"])],
)
def test_experts_without_gates(name: str, ranks: int, write: Write, make_llm: MakeLLM) -> None:
    """Beside Mamba2, whose projections are in the format, too."""
    folder, dense = write("nemotronh experts", PUBLISHED[name], **EXPERTS, **WITHOUT_GATES)
    options = {**OPTIONS, "kvcache_block_size": 64}
    llm = make_llm(folder, **options, tensor_parallel_size=ranks)
    assert tokens_of(llm) == tokens_of(make_llm(dense, **options))


@pytest.mark.parametrize("ranks", [1, *whole_only([2])])
@pytest.mark.parametrize("name", MIXED)
def test_mixed_formats(name: str, ranks: int, write: Write, make_llm: MakeLLM) -> None:
    """Some matrices have other bits, some none, and the output projection may be quantized, too."""
    folder, dense = write("qwen3", MIXED[name])
    oracle = Oracle(dense)
    llm = make_llm(folder, **OPTIONS, tensor_parallel_size=ranks)
    assert tokens_of(llm) == [oracle.greedy(prompt, TOKENS, ignore_eos=True) for prompt in PROMPTS]


def test_modelopt_with_a_file_of_its_own(write: Write, make_llm: MakeLLM) -> None:
    """And with scales of a KV cache in FP8, which other caches ignore."""
    folder, dense = write("qwen3", MIXED["modelopt"])
    settings = json.loads((Path(folder) / "config.json").read_text())
    config = settings.pop("quantization_config")
    del config["quant_method"]
    (Path(folder) / "config.json").write_text(json.dumps(settings))
    (Path(folder) / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": config}))
    tensors = load_file(f"{folder}/model.safetensors")
    for kind in "kv":
        tensors[f"model.layers.1.self_attn.{kind}_proj.{kind}_scale"] = torch.tensor(0.5)
    save_file(tensors, f"{folder}/model.safetensors", {"format": "pt"})
    assert tokens_of(make_llm(folder, **OPTIONS)) == tokens_of(make_llm(dense, **OPTIONS))
    scoring = make_llm(folder, **OPTIONS).engine.ranks.runner.steps.model.layers[1].mixer.attention.scoring
    assert scoring.kv_scales.tolist() == [0.5, 0.5]


def test_multimodal_checkpoints(write: Write, make_llm: MakeLLM) -> None:
    """Their configs name the modules of the language model as their files do."""
    config = {**PUBLISHED["awq"].config, "modules_to_not_convert": ["visual", "model.language_model.layers.0."]}
    folder, dense = write("qwen3-vl", Published(config, PUBLISHED["awq"].write, {"layers.0.": None, "visual": None}))
    assert tokens_of(make_llm(folder, **OPTIONS)) == tokens_of(make_llm(dense, **OPTIONS))


ON_THE_FLY = ["int4", "int8", "mxfp4", "nf4"]
DRAWN = ["gptq act order with zeros", "modelopt", "mxfp4"]


class TestOnTheFly:
    """A checkpoint of other numbers is rounded as it loads, tensor by tensor."""

    @pytest.mark.parametrize("family", ["qwen3moe", *whole_only(["qwen3", "phi3", "gptoss", "qwen3.5", "gemma3"])])
    @pytest.mark.parametrize("quantization", ["int4", *whole_only(["int8", "mxfp4", "nf4"])])
    def test_ranks_round_alike(self, quantization: str, family: str, write: Write, make_llm: MakeLLM) -> None:
        folder, _ = write(family, PUBLISHED["int4 groups"], **EXPERTS)
        options = {**OPTIONS, **CASES[family].small, "quantization": quantization}
        one, two = (make_llm(f"{folder}/source", **options, tensor_parallel_size=ranks) for ranks in (1, 2))
        assert tokens_of(one) == tokens_of(two)

    @pytest.mark.parametrize("quantization", ["int4", "mxfp4"])
    @pytest.mark.parametrize(
        ("module", "name"),
        [
            *[
                (f"self_attn.{one}", "int8")
                for one in ("q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "o_proj")
            ],
            *[(f"linear_attn.{one}", "int8") for one in ("in_proj_qkv", "in_proj_qkvz", "in_proj_z", "out_proj")],
            *[(one, None) for one in ("mlp.gate_proj", "mlp.experts.3.gate_proj", "conv.in_proj")],
            ("linear_attn.in_proj_ba", "the model's dtype"),
        ],
    )
    def test_attention_has_eight_bits(self, module: str, name: str | None, quantization: str) -> None:
        """The others have four, but for a delta rule's strengths and decays."""
        format = table.ON_THE_FLY[quantization].of(f"model.layers.1.{module}")
        assert format.name == (name or {"int4": "int4", "mxfp4": "MXFP4"}[quantization])

    @pytest.mark.parametrize("quantization", ON_THE_FLY)
    def test_random_weights(self, quantization: str, make_llm: MakeLLM) -> None:
        llm = make_llm(load_format="dummy", quantization=quantization, **OPTIONS)
        store = llm.engine.ranks.runner.steps.model.layers[0].mlp.gate_up_proj.matrix.store
        assert store.dense(torch.float32).std() == pytest.approx(0.02, rel=0.02)
        assert tokens_of(llm)


@pytest.mark.parametrize("name", [*DRAWN, *whole_only([name for name in PUBLISHED if name not in DRAWN])])
def test_random_weights_of_a_checkpoint(name: str, write: Write, make_llm: MakeLLM) -> None:
    """They are drawn as words and scales."""
    folder, _ = write("qwen3", PUBLISHED[name])
    first, second = (make_llm(folder, load_format="dummy", **OPTIONS) for _ in range(2))
    store = first.engine.ranks.runner.steps.model.layers[0].mlp.gate_up_proj.matrix.store
    assert store.dense(torch.float32).std() == pytest.approx(0.02, rel=0.2)
    assert tokens_of(first) == tokens_of(second)


class TestChanges:
    """Updates of weights that are in four or eight bits here."""

    @pytest.mark.parametrize(
        ("family", "quantization", "ranks"),
        [
            ("qwen3moe", "int4", 2),
            *whole_only(
                [
                    *[("qwen3moe", "mxfp4", 1), ("qwen3moe", "int8", 2), ("qwen3", "int8", 1), ("qwen3", "mxfp4", 2)],
                    *[("qwen3moe", "nf4", 2), ("qwen3", "nf4", 1)],
                ]
            ),
            *whole_only([("phi3", "int4", 1), ("phi3", "int8", 2), ("gptoss", "mxfp4", 1), ("gptoss", "int4", 2)]),
        ],
    )
    def test_updates_equal_a_fresh_start(
        self, family: str, quantization: str, ranks: int, write: Write, make_llm: MakeLLM
    ) -> None:
        folder, _ = write(family, PUBLISHED["int4 groups"], **EXPERTS)
        source = load_file(f"{folder}/source/model.safetensors")
        options = {**OPTIONS, "quantization": quantization, "tensor_parallel_size": ranks}
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
        llm.sleep(level=1)
        llm.wake_up()
        assert tokens_of(llm) == before

    @pytest.mark.parametrize(
        ("name", "ranks"),
        [
            *ONE_RANK,
            (FIRST[1], 2),
            *whole_only((name, 1) for name in PUBLISHED if name not in FIRST),
            *whole_only(both for both in TWO_RANKS if both != (FIRST[1], 2)),
        ],
    )
    def test_checkpoints_come_again(self, name: str, ranks: int, write: Write, make_llm: MakeLLM) -> None:
        folder, _ = write("qwen3", PUBLISHED[name])
        llm = make_llm(folder, **OPTIONS, tensor_parallel_size=ranks)
        expected = tokens_of(llm)
        llm.sleep(level=2)
        llm.wake_up()
        llm.load_weights(folder)
        assert tokens_of(llm) == expected
        llm.update_weights(dict(reversed(load_file(f"{folder}/model.safetensors").items())))
        assert tokens_of(llm) == expected

    @pytest.mark.parametrize(
        "name", ["int4 groups", "int4 with zeros", "nf4", *whole_only(["mxfp4", "awq", "gptq", "int8 groups"])]
    )
    @pytest.mark.parametrize("family", ["qwen3", *whole_only(["qwen3moe"])])
    def test_plain_weights_are_rounded(self, family: str, name: str, write: Write, make_llm: MakeLLM) -> None:
        """Into the groups of the checkpoint, of which they may also replace some."""
        folder, dense = write(family, PUBLISHED[name], **EXPERTS)
        llm = make_llm(folder, **OPTIONS)
        expected = tokens_of(llm)
        source = load_file(f"{folder}/source/model.safetensors")
        llm.update_weights({name: -tensor for name, tensor in source.items()})
        assert tokens_of(llm) != expected
        llm.load_weights(dense)
        assert tokens_of(llm) == expected  # numbers that are in the format already stay what they are
        matrix = "model.layers.1.self_attn.o_proj.weight"
        llm.update_weights({matrix: source[matrix]}, partial=True)
        assert tokens_of(llm)

    @pytest.mark.parametrize("name", ["gptq act order", "nvfp4"])
    def test_plain_weights_are_refused(self, name: str, write: Write, make_llm: MakeLLM) -> None:
        folder, dense = write("qwen3", PUBLISHED[name])
        llm = make_llm(folder, **OPTIONS)
        expected = tokens_of(llm)
        matrix = "model.layers.1.self_attn.o_proj.weight"
        message = rf"{matrix}: weights in (GPTQ|NVFP4) cannot be rounded from others: they must come as"
        with pytest.raises(ValueError, match=message):
            llm.update_weights({matrix: load_file(f"{dense}/model.safetensors")[matrix]}, partial=True)
        llm.load_weights(folder)
        assert tokens_of(llm) == expected


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3", "gptq act order"),
        *whole_only([("qwen3", "int4 with zeros"), ("qwen3moe", "int4 groups"), ("phi3", "modelopt")]),
        *whole_only([("qwen3", "nf4 twice"), ("phi3", "fp4"), ("qwen3moe", "llm.int8")]),
    ],
)
def test_ranks_have_the_bits_of_one(family: str, name: str, write: Write, make_llm: MakeLLM) -> None:
    """With deterministic=True, on the CPU."""
    folder, dense = write(family, PUBLISHED[name], **EXPERTS)
    params, prompts = greedy(4, ignore_eos=True, logprobs=2, prompt_logprobs=1), [[7], list(range(20, 32)), [5, 6] * 5]
    results = []
    for ranks in (1, 2):
        llm = make_llm(folder, **OPTIONS, deterministic=True, tensor_parallel_size=ranks)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        results.append([(output.token_ids, output.logprobs, output.prompt_logprobs) for output in outputs])
    assert results[0] == results[1]
    usual = make_llm(dense, **OPTIONS).generate(prompts, greedy(2, ignore_eos=True), use_tqdm=False)
    assert [tokens[:2] for tokens, *_ in results[0]] == [output.token_ids for output in usual]


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.multi_gpu)])
@pytest.mark.parametrize("eager", [False, *whole_only([True])])
@pytest.mark.parametrize(
    ("family", "name"),
    [
        *[("qwen3", name) for name in FIRST],
        ("qwen3moe", "int4 groups"),
        *whole_only([("qwen3", name) for name in ORDERED]),
        *whole_only([("qwen3moe", name) for name in (*FIRST[1:], *ORDERED)]),
    ],
)
def test_gpus_give_the_tokens_of_the_cpu(
    family: str, name: str, eager: bool, ranks: int, write: Write, make_llm: MakeLLM
) -> None:
    folder, dense = write(family, PUBLISHED[name], **EXPERTS)
    options = {"kvcache_block_size": 16, "max_model_len": 160, "max_num_seqs": 4, "enforce_eager": eager}
    llm = make_llm(folder, **options, dtype="float32", tensor_parallel_size=ranks)
    assert tokens_of(llm) == tokens_of(make_llm(dense, **OPTIONS))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "name"),
    [
        *[("qwen3moe", name) for name in (*FIRST, *ON_THE_FLY)],
        *[("qwen3", name) for name in ("nvfp4", "int4")],
        *whole_only([("qwen3moe", name) for name in PUBLISHED if name not in FIRST]),
        *whole_only([("qwen3", name) for name in (*PUBLISHED, *ON_THE_FLY) if name not in ("nvfp4", "int4")]),
    ],
)
def test_log_probabilities_on_a_gpu(family: str, name: str, write: Write, make_llm: MakeLLM) -> None:
    """In bfloat16 they are those of the CPU, but for its errors, of one token and of several."""
    folder, _ = write(family, PUBLISHED.get(name, PUBLISHED["int4 groups"]), **EXPERTS)
    model, how = (f"{folder}/source", {"quantization": name}) if name in ON_THE_FLY else (folder, {})
    options = {"kvcache_block_size": 16, "max_model_len": 160, "max_num_seqs": 4, **how}
    params = greedy(2, ignore_eos=True, prompt_logprobs=0, logprobs=0)
    ours, theirs = (
        make_llm(model, **options, device=device).generate(PROMPTS, params, use_tqdm=False)
        for device in ("cuda", "cpu")
    )
    for one, other in zip(ours, theirs, strict=True):
        for entry, expected in zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            for token, logprob in expected.items():
                assert entry[token].logprob == pytest.approx(logprob.logprob, abs=0.15)


class TestQuality:
    """The bundled model knows its text by heart in few parameters: it bears little noise.

    Any four bits a number leave normal weights a noise of a sixteenth at least, and groups of 64 leave one of a tenth.
    """

    @pytest.mark.parametrize(
        ("quantization", "most"), [("int8", 0.003), *whole_only([("int4", 0.65), ("mxfp4", 1.25), ("nf4", 1.3)])]
    )
    def test_perplexity(self, quantization: str, most: float, recited: list[RequestOutput]) -> None:
        plain, rounded = of_tokens(recited), of_tokens(recited, quantization=quantization)
        assert -0.01 < math.expm1((sum(plain) - sum(rounded)) / len(plain)) < most


class TestBadInput:
    @pytest.mark.parametrize(
        ("name", "change", "message"),
        [
            ("gptq", {"bits": 3}, "bits=3: must be 4 or 8"),
            ("gptq", {"group_size": 0}, "group_size=0: must be an integer above 0, or -1"),
            ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format='marlin': must be one of gptq, gptq_v2"),
            (
                "gptq",
                {"quant_method": "hqq"},
                "is not supported; .*; convert it with llm-compressor, GPTQModel",
            ),
            ("awq", {"bits": 8}, "bits=8: must be 4"),
            ("awq", {"version": "gemv"}, "version='gemv': must be one of gemm, GEMM"),
            ("auto-round", {"packing_format": "auto_round:x"}, "packing_format='auto_round:x': must be one of"),
            ("auto-round", {"data_type": "mx_fp"}, "data_type='mx_fp': must be one of int"),
            ("modelopt", {"quant_algo": "W4A8_AWQ"}, "quant_algo='W4A8_AWQ': must be one of NVFP4, FP8, MIXED_PREC"),
            ("modelopt", {"group_size": 32}, "group_size=32: must be 16 for NVFP4"),
        ],
    )
    def test_configs(self, name: str, change: dict[str, Any], message: str, tmp_path: Path) -> None:
        self._check({**PUBLISHED[name].config, **change}, message, tmp_path)

    @pytest.mark.parametrize(
        ("format", "weights", "message"),
        [
            (
                "pack-quantized",
                {"type": "int", "num_bits": 4, "strategy": "block"},
                "strategy='block': must be 'group'",
            ),
            (
                "pack-quantized",
                {"type": "int", "num_bits": 4, "strategy": "group"},
                "group_size=None: must be an integer",
            ),
            (
                "pack-quantized",
                {"type": "int", "num_bits": 3},
                "weights=.*'num_bits': 3.*: must be 8-bit floats, 4-bit",
            ),
            (
                "pack-quantized",
                {"type": "int", "num_bits": 4, "actorder": "x"},
                "actorder='x': must be 'group', 'static'",
            ),
            ("marlin-24", {"type": "int", "num_bits": 4}, "format='marlin-24' .*: must be 8-bit floats, 4-bit floats"),
            (
                "nvfp4-pack-quantized",
                {"type": "float", "num_bits": 4, "group_size": 8},
                "'group_size': 8.*: must be 8-bit",
            ),
        ],
    )
    def test_groups_of_compressed_tensors(
        self, format: str, weights: dict[str, Any], message: str, tmp_path: Path
    ) -> None:
        self._check(compressed(format, **weights), message, tmp_path)

    def _check(self, config: dict[str, Any], message: str, folder: Path) -> None:
        build(CASES["qwen3"], folder)
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**settings, "quantization_config": config}))
        with pytest.raises(ValueError, match=message):
            LLM(str(folder), **OPTIONS)

    @pytest.mark.parametrize(
        ("name", "end", "change", "message"),
        [
            ("gptq with zeros", "scales", lambda one: None, "missing: {}"),
            (
                "gptq with zeros",
                "scales",
                lambda one: one[:1],
                r"{} has shape \[1, 64\], but the model needs \[3, 64\]",
            ),
            (
                "gptq with zeros",
                "qzeros",
                lambda one: one[:, :1],
                r"{} has shape \[3, 1\], but the model needs \[3, 8\]",
            ),
            ("gptq with zeros", "qweight", lambda one: one.float(), "{} has numbers of type F32: must be one of I32"),
            ("gptq with zeros", "scales", lambda one: one * math.nan, "{} has numbers that are NaN or infinite"),
            ("gptq", "qzeros", lambda one: one + 1, "{}: its number 0 is 9: must be 8"),
            ("gptq", "g_idx", lambda one: one.flip(0), "{}: its number 0 is 2: must be 0"),
            ("int4 groups", "weight_shape", lambda one: one + 1, "{}: its number 0 is 65: must be 64"),
            ("nvfp4", "weight_global_scale", lambda one: one * 0, "{} has numbers that are NaN or infinite"),
            ("mxfp4", "weight_scale", lambda one: one | 255, "{} has numbers that are NaN or infinite"),
            ("mxfp4", "weight_scale", lambda one: (one | 255) - 62, "{} has numbers that are NaN or infinite"),
        ],
    )
    def test_tensors(
        self, name: str, end: str, change: Callable[[Tensor], Tensor | None], message: str, write: Write
    ) -> None:
        folder, _ = write("qwen3", PUBLISHED[name])
        file = Path(folder) / "model.safetensors"
        tensors, changed = load_file(file), f"model.layers.1.mlp.down_proj.{end}"
        tensor = change(tensors.pop(changed))
        if tensor is not None:
            tensors[changed] = tensor.contiguous()
        save_file(tensors, file, {"format": "pt"})
        with pytest.raises(ValueError, match=message.format(changed)):
            LLM(folder, **OPTIONS)

    def test_a_format_that_the_checkpoint_has_not(self, write: Write) -> None:
        folder, _ = write("qwen3", PUBLISHED["gptq"])
        with pytest.raises(ValueError, match="quantization='int4': the checkpoint's matrices are in GPTQ already"):
            LLM(folder, quantization="int4", **OPTIONS)

    def test_a_checkpoint_in_eight_bits_alone(self, write: Write) -> None:
        """Of what int4 makes, some matrices have eight bits; that does not make all of them right."""
        folder, _ = write("qwen3", PUBLISHED["int8 groups"])
        with pytest.raises(ValueError, match="quantization='int4': the checkpoint's matrices are in int8 already"):
            LLM(folder, quantization="int4", **OPTIONS)

    def test_gguf_beside_a_config(self, write: Write) -> None:
        folder, _ = write("qwen3", PUBLISHED["gptq"])
        (Path(folder) / "model.safetensors").rename(Path(folder) / "model.gguf")
        with pytest.raises(ValueError, match=r"the folder has no \*.safetensors file; .*give gguf_file='model.gguf'"):
            LLM(folder, **OPTIONS)
