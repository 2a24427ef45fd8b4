"""bench.py --save: what it writes, as transformers and an LLM read it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import HAS_CUDA, Oracle, greedy, of_each_kind
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

sys.path.insert(0, str(Path(__file__).parent.parent))

import bench
from nanoinfer import LLM
from nanoinfer.benchmark import save
from nanoinfer.benchmark.eyes.families import internvl3, smolvlm
from nanoinfer.benchmark.eyes.shapes import EYES
from nanoinfer.benchmark.shapes import SHAPES
from nanoinfer.weights import saving
from nanoinfer.weights.formats.groups.fields import Packing
from nanoinfer.weights.formats.groups.layouts import AWQ_PLACES, PAIRS

DENSE, DEEP = (64, 128, 2, 4, 2, 32, False, 512), (64, 128, 4, 4, 2, 32, False, 512)
MIXTURE = (128, 128, 2, 4, 2, 32, False, 512)
DELTA = {f"linear_{what}": size for what, size in (
    ("num_key_heads", 2), ("num_value_heads", 4), ("key_head_dim", 32), ("value_head_dim", 32),
)}  # fmt: skip
MAMBA = {"mamba_d_head": 32, "mamba_d_state": 32, "mamba_chunk_size": 16}
FEW = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
SMALL = {
    "qwen2.5-7b": (DENSE, {}),
    "llama-8b": (DENSE, {}),
    "phi4-14b": (DENSE, {}),
    "gemma3-12b": ((64, 128, 6, 4, 2, 32, True, 512), {}),
    "gemma4-26b-a4b": (
        (64, 128, 6, 4, 2, 32, True, 512),
        {**FEW, "top_k_experts": 2, "num_global_key_value_heads": 1, "global_head_dim": 64},
    ),
    "olmo2-7b": (DENSE, {"num_key_value_heads": 4}),
    "30b-a3b": (MIXTURE, FEW),
    "olmoe-7b": (MIXTURE, {"num_experts": 4, "num_experts_per_tok": 2}),
    "gpt-oss-20b": (MIXTURE, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt-oss-20b-mxfp4": (MIXTURE, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3.5-0.8b": (DEEP, DELTA),
    "qwen3.5-35b-a3b": (DEEP, {**DELTA, **FEW, "shared_expert_intermediate_size": 128}),
    "qwen3-next-80b": (DEEP, {**DELTA, **FEW, "shared_expert_intermediate_size": 128}),
    "granite-4-h-tiny": (
        MIXTURE,
        {
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 128,
            "mamba_n_heads": 8,
            **MAMBA,
        },
    ),
    "falcon-h1-7b": (DENSE, {"mamba_n_heads": 6, "mamba_d_ssm": 192, **MAMBA}),
    "glm-4.5-air": (MIXTURE, {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}),
    "glm-4.7-flash": (
        (128, 128, 2, 4, 4, 64, False, 512),
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    ),
    "nemotron-3-nano": (
        (128, 128, 4, 4, 2, 32, False, 512),
        {
            "hybrid_override_pattern": "ME*E",
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "n_groups": 2,
            "ssm_state_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "moe_shared_expert_intermediate_size": 64,
        },
    ),
    "tiny-vl": ((64, 128, 2, 1, 1, 128, True, 512), {}),
    "internvl3-8b": ((128, 128, 2, 4, 2, 32, False, 512), {}),
    "smolvlm-2b": ((128, 128, 2, 4, 4, 32, False, 512), {}),
}  # published shapes, with these sizes and settings instead
SMALL_EYES = {
    "internvl3-8b": internvl3(32, 64, 1, 2, 128),
    "smolvlm-2b": smolvlm(32, 64, 1, 2, 128),
}
PROMPTS = [[5, 400, 17, 3, 250], [9] * 9]
TOKENS = 12


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The published shapes are small ones."""
    for name, (sizes, settings) in SMALL.items():
        monkeypatch.setitem(SHAPES, name, (sizes, SHAPES[name][1] | settings))
    for name, eyes in SMALL_EYES.items():
        monkeypatch.setitem(EYES, name, eyes)


Run = Callable[..., str]
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run bench.py --save; returns the folder."""

    def run(command: str, device: str = "cpu") -> str:
        folder = tmp_path / "saved"
        monkeypatch.setattr(sys, "argv", ["bench.py", *command.split(), "--device", device, "--save", str(folder)])
        bench.main()
        return str(folder)

    return run


@pytest.fixture
def drawn(tmp_path: Path, make_llm: Callable[..., LLM]) -> Callable[..., LLM]:
    """Make the LLM of random weights that bench.py makes without --save."""

    def make(name: str, **options: object) -> LLM:
        (folder := tmp_path / "config").mkdir()
        bench.write_config(name, str(folder))
        return make_llm(str(folder), device="cpu", **{"load_format": "dummy", **options})

    return make


def tokens_of(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, greedy(TOKENS, ignore_eos=True), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def theirs(model: nn.Module) -> list[list[int]]:
    """The tokens that a model of transformers generates."""
    oracle = Oracle.__new__(Oracle)
    oracle.model = model.eval()
    return [oracle.greedy(prompt, TOKENS, ignore_eos=True) for prompt in PROMPTS]


def loaded(folder: str, kind: type = AutoModelForCausalLM, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Load a checkpoint by transformers, which misses no tensor and knows all."""
    model, info = kind.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(info.values()), info
    return model


@pytest.mark.parametrize("name", of_each_kind(zip(name for name in SMALL if name not in EYES), 7))
def test_the_same_tokens_from_the_shape_its_checkpoint_and_transformers(
    name: str, run: Run, drawn: Callable[..., LLM], make_llm: Callable[..., LLM]
) -> None:
    folder = run(f"--config {name}")
    tokens = tokens_of(make_llm(folder, device="cpu"))
    assert tokens == tokens_of(drawn(name)) == theirs(loaded(folder))
    assert len(set(tokens[0])) > 1


@pytest.mark.parametrize(
    ("name", "quantization"),
    of_each_kind(
        [
            ("30b-a3b", "fp8"), ("30b-a3b", "int4"), ("30b-a3b", "int8"), ("30b-a3b", "mxfp4"), ("tiny", "int4"),
            ("phi4-14b", "fp8"), ("phi4-14b", "mxfp4"), ("qwen3.5-35b-a3b", "fp8"), ("gpt-oss-20b-mxfp4", "mxfp4"),
            *(("nemotron-3-nano", kind) for kind in ("int4", "int8", "fp8", "mxfp4")),
        ],
        1, 5, 8,
    ),
)  # fmt: skip
def test_each_format_is_read_as_it_was_rounded(
    name: str, quantization: str, run: Run, drawn: Callable[..., LLM], make_llm: Callable[..., LLM]
) -> None:
    folder = run(f"--config {name} --quantization {quantization}")
    assert tokens_of(make_llm(folder, device="cpu")) == tokens_of(drawn(name, quantization=quantization))


@pytest.mark.parametrize(
    ("name", "quantization"),
    of_each_kind([("phi4-14b", "fp8"), *((name, kind) for name in ("tiny", "30b-a3b") for kind in ("fp8", "int8"))], 0),
)
def test_transformers_reads_each_format(name: str, quantization: str, run: Run, make_llm: Callable[..., LLM]) -> None:
    if quantization == "fp8":
        pytest.importorskip("accelerate", reason="transformers loads FP8 with it")
    if HAS_CUDA and quantization == "fp8":
        pytest.importorskip("kernels", reason="on a GPU, transformers multiplies FP8 by the package kernels")
    folder = run(f"--config {name} --quantization {quantization}")
    assert tokens_of(make_llm(folder, device="cpu")) == theirs(loaded(folder))


@pytest.mark.parametrize("quantization", of_each_kind(zip(["int4", "int8"]), 0))
def test_compressed_tensors_reads_each_matrix(quantization: str, run: Run, make_llm: Callable[..., LLM]) -> None:
    """By transformers, it cannot load zero points that are packed, though it packs them."""
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors: pip install -e '.[test]'")
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    folder = run(f"--config tiny --quantization {quantization}")
    tensors, config = load_file(f"{folder}/model.safetensors"), AutoConfig.from_pretrained(folder)
    settings = QuantizationConfig.model_validate(config.quantization_config)
    del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        apply_quantization_config(model, settings)
    state = {name: tensor for name, tensor in tensors.items() if name in dict(model.named_parameters())}
    for name, module in model.named_modules():
        if scheme := getattr(module, "quantization_scheme", None):
            own = {
                key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items() if key.startswith(f"{name}.")
            }
            state[f"{name}.weight"] = PackedQuantizationCompressor.decompress(own, scheme)["weight"].float()
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    assert plain.load_state_dict(state, strict=False).missing_keys in ([], ["lm_head.weight"])
    assert tokens_of(make_llm(folder, device="cpu")) == theirs(plain)


@pytest.mark.whole
def test_transformers_reads_mxfp4(run: Run, make_llm: Callable[..., LLM]) -> None:
    """It decompresses them to bfloat16, which has all numbers of MXFP4."""
    folder = run("--config phi4-14b --quantization mxfp4")
    model = loaded(folder, dtype=torch.bfloat16)
    model(torch.tensor([[1]]))
    assert tokens_of(make_llm(folder, device="cpu")) == theirs(nn.Module.float(model))


def test_skewed_routers(run: Run, drawn: Callable[..., LLM], make_llm: Callable[..., LLM]) -> None:
    folder = run("--config 30b-a3b --routing skewed")
    sizes = load_file(f"{folder}/model.safetensors")["model.layers.0.mlp.gate.weight"].norm(dim=1)
    assert sizes[0] > 2 * sizes[-1]
    assert tokens_of(make_llm(folder, device="cpu")) == tokens_of(drawn("30b-a3b", load_format="dummy_skewed"))


@pytest.mark.parametrize(
    ("name", "quantization"),
    of_each_kind(
        [
            *(("tiny-vl", quantization) for quantization in (None, "int8", "fp8")),
            *((name, None) for name in SMALL_EYES),
        ],
        0, 3, 4,
    ),
)  # fmt: skip
def test_a_model_that_sees(name: str, quantization: str | None, run: Run, drawn: Callable[..., LLM]) -> None:
    pytest.importorskip("PIL", reason="needs pillow: pip install -e '.[test]'")
    folder = run(f"--config {name}" + (f" --quantization {quantization}" if quantization else ""))
    assert tokens_of(drawn(name, quantization=quantization)) == theirs(loaded(folder, AutoModelForImageTextToText))


def test_several_files_and_the_dtype(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "FILE_BYTES", 100_000)
    folder = Path(run("--config tiny --dtype bfloat16"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values()))
    assert len(files) == 3
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"
    tensors = {name: tensor for file in files for name, tensor in load_file(folder / file).items()}
    assert tensors.keys() == index["weight_map"].keys()
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert sum(tensor.nbytes for tensor in tensors.values()) == index["metadata"]["total_size"]
    assert loaded(str(folder)).lm_head.weight.dtype == torch.float32


@pytest.mark.parametrize("packing", [Packing.in_turn(4, 32), Packing.in_turn(8, 32), PAIRS, AWQ_PLACES])
def test_packed_numbers_are_unpacked(packing: Packing) -> None:
    numbers = torch.randint(1 << packing.bits, (3, 5 * packing.count), dtype=torch.uint8)
    packed = packing.pack(numbers)
    assert packed.shape == (3, 5)
    assert torch.equal(packing.unpack(packed), numbers)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("", "--save {}: writes random weights: name their --config"),
        ("--model bundled", "--save {}: writes random weights: name their --config"),
        ("--config tiny --tp 2", "--tp: makes no sense beside --save, which takes --config, --routing"),
        ("--config tiny --max-num-seqs 3", "--max-num-seqs: makes no sense"),
        ("--config tiny --weights", "--weights: makes no sense"),
        ("--config tiny --json figures.json", "bench.py --model {} takes it afterwards"),
    ],
)
def test_options_that_make_no_sense(command: str, message: str, run: Run, tmp_path: Path, capsys: Captured) -> None:
    with pytest.raises(SystemExit):
        run(command, device="auto")
    assert message.format(tmp_path / "saved") in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["saved/file", "saved", "saved.partial"])
def test_a_folder_that_is_there(name: str, run: Run, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    with pytest.raises(SystemExit):
        run("--config tiny")
    assert "is there" in capsys.readouterr().err


def test_an_empty_folder(run: Run, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "saved").mkdir()
    folder = run("--config tiny")
    assert f"{folder}: random weights of tiny in float32: 24 tensors, 0.000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("--config gpt-oss-20b --quantization int4", "--quantization int4: no checkpoint has --config gpt-oss-20b"),
        ("--config gemma4-26b-a4b --quantization int8", "experts.0.down_proj in int8: must be of the same bits"),
        ("--config tiny --quantization nf4", "matrices in nf4 cannot be written: compressed-tensors has int4, int8"),
        ("--config tiny --quantization nf3", "quantization='nf3'"),
    ],
)
def test_formats_that_no_checkpoint_has(command: str, message: str, run: Run, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=message):
        run(command)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_nothing_is_left_of_what_is_not_whole(
    error: BaseException, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(tensors: dict[str, torch.Tensor], file: Path, metadata: dict[str, str]) -> None:
        file.write_text("half a file")
        raise error

    monkeypatch.setattr(saving, "save_file", broken)
    with pytest.raises((SystemExit, KeyboardInterrupt)) as caught:
        run("--config tiny")
    assert not list(tmp_path.iterdir())
    if isinstance(error, OSError):
        assert "--save" in str(caught.value)
        assert "No space left on device" in str(caught.value)


def test_a_full_disk_is_noticed_before_anything_is_drawn(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimpleNamespace(disk_usage=lambda folder: SimpleNamespace(free=1000), rmtree=shutil.rmtree)
    monkeypatch.setattr(save, "shutil", disk)
    with pytest.raises(SystemExit, match="GB, but the disk has 1e-06 free"):
        run("--config tiny")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "routing"), of_each_kind([("30b-a3b", "skewed"), ("glm-4.5-air", "even")], 0))
def test_the_report_says_which_routers_were_drawn(
    name: str, routing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    sizes = "--num-seqs 2 --min-len 4 --max-len 5 --device cpu"
    file = tmp_path / "figures.json"
    command = f"bench.py --config {name} --routing {routing} {sizes} --json {file}"
    monkeypatch.setattr(sys, "argv", command.split())
    bench.main()
    assert f"\nrandom weights, {routing} routers: tokens use" in capsys.readouterr().out
    assert json.loads(file.read_text())["routing"] == routing
