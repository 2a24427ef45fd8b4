"""Checkpoints that bitsandbytes has quantized: which matrices keep their bits, and which become numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case, build
from cases.layouts import BITSANDBYTES, PUBLISHED, Published
from conftest import Oracle, greedy
from safetensors.torch import load_file, save_file
from test_four_bits import MakeLLM, write_checkpoint
from test_models import run
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from nanoinfer import LLM
from nanoinfer.weights.formats.groups import store
from nanoinfer.weights.formats.groups.matrix import GroupMatrix
from nanoinfer.weights.formats.plain.format import PLAIN
from nanoinfer.weights.formats.plain.matrix import PlainMatrix
from nanoinfer.weights.formats.table import ON_THE_FLY, READERS
from nanoinfer.weights.names import OfTower
from nanoinfer.weights.shards import Shard
from nanoinfer.weights.sources import FileSource

pytestmark = pytest.mark.usefixtures("one_thread")

Write = Callable[..., str]
OPTIONS: dict[str, Any] = {"device": "cpu", "kvcache_block_size": 16, "max_model_len": 320}
WIDE = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "tie_word_embeddings": False}
LLAMA = Case("LlamaForCausalLM", "llama", WIDE)
KINDS = {"nf4": "NF4", "nf4 twice": "NF4", "fp4": "FP4", "llm.int8": "LLM.int8"}
MODULE = "model.layers.1.mlp.down_proj"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a case's checkpoint, and in "dense" beside it what it stands for; all as Published says."""

    def write(case: Case, name: str, **others: Any) -> str:
        build(case, tmp_path / "source")
        published = PUBLISHED[name]
        write_checkpoint(tmp_path / "source", tmp_path, Published(published.config, published.write, others))
        return str(tmp_path)

    return write


def dense_model(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(f"{folder}/dense").eval()


def kinds_of(llm: LLM, layer: int = 1) -> dict[str, str]:
    """Return the formats of a layer's matrices, by the names that these have here; of one with several, each."""
    found: dict[str, list[str]] = {}
    for name, module in llm.engine.ranks.runner.steps.model.layers[layer].named_modules():
        if isinstance(module, (GroupMatrix, PlainMatrix)):
            projection = name.partition(".matrix")[0].rpartition(".")[2]
            found.setdefault(projection, []).append(
                module.store.label if isinstance(module, GroupMatrix) else "numbers"
            )
    return {projection: ", ".join(labels) for projection, labels in found.items()}


@pytest.mark.parametrize("kind", ["nf4", "nf4 twice", "fp4", "llm.int8"])
def test_files_of_bitsandbytes_itself(kind: str, tmp_path: Path, make_llm: MakeLLM) -> None:
    """transformers quantizes and writes; its products would round more than the numbers, so it makes these ones of
    float32."""
    pytest.importorskip("bitsandbytes")
    build(LLAMA, tmp_path / "source")
    how = {"load_in_8bit": True} if kind == "llm.int8" else {"load_in_4bit": True, "bnb_4bit_quant_type": kind[:3]}
    config = BitsAndBytesConfig(**how, bnb_4bit_use_double_quant="twice" in kind)
    options = {"device_map": "cpu", "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "source", quantization_config=config, **options)
    model.save_pretrained(tmp_path / "made")
    llm = make_llm(str(tmp_path / "made"), **OPTIONS)
    assert set(kinds_of(llm).values()) == {KINDS[kind]}
    run(llm, model.dequantize(torch.float32).eval(), prompt_logprobs=0)


@pytest.mark.parametrize("kind", KINDS)
def test_matrices_keep_their_bits(kind: str, write: Write, make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each code and each scale is the file's, also where the CPU has no room for the numbers of the dtype."""
    monkeypatch.setattr(store, "may_keep", lambda *shape: False)
    folder = write(LLAMA, kind)
    llm, model = make_llm(folder, **OPTIONS), dense_model(folder)
    assert kinds_of(llm) == dict.fromkeys(("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), KINDS[kind])
    gate_up = llm.engine.ranks.runner.steps.model.layers[0].mlp.gate_up_proj.matrix
    mlp = model.model.layers[0].mlp
    expected = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
    torch.testing.assert_close(gate_up.store.dense(torch.float32), expected, rtol=3e-7, atol=0)
    run(llm, model)


def test_blocks_across_rows_become_numbers(write: Write, make_llm: MakeLLM, caplog: pytest.LogCaptureFixture) -> None:
    """Their rows have no whole number of blocks; and the log says it."""
    folder = write(Case("LlamaForCausalLM", "llama", {**WIDE, "intermediate_size": 81}), "nf4 twice")
    with caplog.at_level("INFO", "nanoinfer"):
        llm = make_llm(folder, **OPTIONS)
    assert kinds_of(llm) == {"qkv_proj": "NF4", "o_proj": "NF4", "gate_up_proj": "NF4", "down_proj": "numbers"}
    assert f"model={folder!r}: 2 matrices of bitsandbytes became numbers of float32: they take 0.000 GB" in caplog.text
    run(llm, dense_model(folder))


def test_a_matrix_in_several_files(write: Write, make_llm: MakeLLM) -> None:
    folder = Path(write(LLAMA, "nf4 twice"))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files: dict[str, dict[str, Tensor]] = {"a.safetensors": {}, "b.safetensors": {}}
    for place, (name, tensor) in enumerate(sorted(tensors.items())):
        files["ab"[place % 2] + ".safetensors"][name] = tensor
    for file, some in files.items():
        save_file(some, folder / file, {"format": "pt"})
    index = {"weight_map": {name: file for file, some in files.items() for name in some}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    run(make_llm(str(folder), **OPTIONS), dense_model(str(folder)))


def test_what_is_plain_in_the_files(write: Write, make_llm: MakeLLM) -> None:
    """It stays so, also beside matrices that are multiplied as one with it. The config need not name it."""
    folder = write(LLAMA, "nf4", **{"layers.1.self_attn.q_proj": None, "layers.1.mlp.down_proj": None})
    llm = make_llm(folder, **OPTIONS)
    assert kinds_of(llm) == {"qkv_proj": "numbers, NF4", "o_proj": "NF4", "gate_up_proj": "NF4", "down_proj": "numbers"}
    assert set(kinds_of(llm, 0).values()) == {"NF4"}
    run(llm, dense_model(folder))


@pytest.mark.parametrize("kind", ["nf4", "llm.int8"])
def test_matrices_that_others_store_turned(kind: str, tmp_path: Path, make_llm: MakeLLM) -> None:
    """GPT-2's: transformers turns them before bitsandbytes gets them."""
    case = Case("GPT2LMHeadModel", "gpt2", {"n_embd": 64, "n_inner": 80, "n_head": 4, "n_layer": 2})
    build(case, tmp_path / "dense")
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": BITSANDBYTES}))
    stored, plain = {}, load_file(tmp_path / "dense" / "model.safetensors")
    for name, tensor in list(plain.items()):
        stored[name] = tensor
        if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            del stored[name]
            tensors, dense = PUBLISHED[kind].write(tensor.T.contiguous())
            plain[name] = dense.T.contiguous()
            stored |= {f"{name.removesuffix('weight')}{end}": one for end, one in tensors.items()}
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    save_file(plain, tmp_path / "dense" / "model.safetensors", {"format": "pt"})
    llm, oracle = make_llm(str(tmp_path), **OPTIONS), Oracle(str(tmp_path / "dense"))
    for _ in range(2):
        outputs = llm.generate([[5], list(range(20, 40))], greedy(5, ignore_eos=True), use_tqdm=False)
        assert [output.token_ids for output in outputs] == [
            oracle.greedy(output.prompt_token_ids, 5, ignore_eos=True) for output in outputs
        ]
        llm.update_weights(stored)


def test_towers_get_numbers(tmp_path: Path) -> None:
    weight = torch.randn(24, 40)
    tensors, dense = PUBLISHED["nf4 twice"].write(weight)
    stored = {f"model.vision_tower.q_proj.{end}": tensor for end, tensor in tensors.items()}
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    name, target = "vision_tower.q_proj.weight", torch.empty(24, 40)
    FileSource(str(tmp_path), OfTower()).fill({name: [Shard(name, target, (24, 40))]})
    torch.testing.assert_close(target, dense)


def test_rounding_is_that_of_bitsandbytes(write: Write, make_llm: MakeLLM) -> None:
    folder = write(LLAMA, "nf4")
    llm = make_llm(f"{folder}/source", **OPTIONS, quantization="nf4")
    assert set(kinds_of(llm).values()) == {"NF4"}
    run(llm, dense_model(folder))
    again = make_llm(folder, **OPTIONS, quantization="bitsandbytes", load_format="bitsandbytes")  # vLLM's names
    run(again, dense_model(folder))


def test_which_modules_are_rounded() -> None:
    for name, is_kept in (("model.layers.0.self_attn.q_proj", False), ("lm_head", True)):
        assert (ON_THE_FLY["nf4"].of(name) == PLAIN) == is_kept
        assert (READERS["bitsandbytes"](BITSANDBYTES).of(name) == PLAIN) == is_kept
    some = READERS["bitsandbytes"]({**BITSANDBYTES, "llm_int8_skip_modules": ["o_proj", "model.layers.1"]})
    kept = ["model.layers.0.self_attn.o_proj", "model.layers.1.mlp.up_proj", "model.layers.10.mlp.up_proj"]
    assert [some.of(name) == PLAIN for name in kept] == [True, True, False]


class TestBadInput:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"bnb_4bit_quant_type": "fp8"}, "bnb_4bit_quant_type='fp8': must be one of nf4, fp4"),
            ({"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage='bfloat16': must be 'uint8'"),
            ({"llm_int8_has_fp16_weight": True}, "llm_int8_has_fp16_weight=True: must be False"),
            ({"llm_int8_threshold": "six"}, "llm_int8_threshold='six': must be a number"),
            ({"unheard_of": 1}, "unheard_of=1: nothing reads it here"),
            ({"modules": {}}, "quant_method='bitsandbytes', but no matrix in the files is"),
        ],
    )
    def test_configs(self, change: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=f"^model: quantization_config has {message}"):
            READERS["bitsandbytes"]({**BITSANDBYTES, **change})

    @pytest.mark.parametrize(
        ("end", "change", "message"),
        [
            (".absmax", None, r"there is no .*down_proj\.weight\.absmax"),
            (".absmax", lambda one: one[1:].clone(), r"shape \[383\] and torch.float32: must be \[384\]"),
            ("", lambda one: one.view(-1, 192), r"shape \[64, 192\] .*: must be \[12288, 1\]"),
            ("", Tensor.char, r"torch\.int8: must be \[12288, 1\] and torch\.uint8"),
            (".quant_map", lambda one: one.flip(0), "its quant_map is not that of nf4"),
            (".quant_state.bitsandbytes__nf4", lambda one: one[:-1].clone(), "delimiter"),
            (
                ".quant_state.bitsandbytes__nf4",
                lambda one: state_of(one, quant_type="int4"),
                "must have a quant_type nf4 or",
            ),
            (
                ".quant_state.bitsandbytes__nf4",
                lambda one: state_of(one, shape=[7]),
                r"quant_state is .*'shape': \[7\]",
            ),
        ],
    )
    def test_files(self, end: str, change: Callable[[Tensor], Tensor] | None, message: str, write: Write) -> None:
        folder = write(LLAMA, "nf4")
        file, name = Path(folder) / "model.safetensors", f"{MODULE}.weight{end}"
        tensors = load_file(file)
        changed = tensors.pop(name)
        save_file(tensors if change is None else {**tensors, name: change(changed)}, file, {"format": "pt"})
        told = rf"model\.safetensors: {MODULE}\.weight is not as bitsandbytes writes it: .*{message}"
        with pytest.raises(ValueError, match=told):
            LLM(folder, **OPTIONS)

    def test_rows_in_another_order(self, write: Write) -> None:
        folder = write(LLAMA, "llm.int8")
        file = Path(folder) / "model.safetensors"
        save_file({**load_file(file), f"{MODULE}.weight_format": torch.tensor(2).byte()}, file, {"format": "pt"})
        with pytest.raises(ValueError, match="its weight_format is 2: must be 0, for rows"):
            LLM(folder, **OPTIONS)

    def test_matrices_that_are_not_quantized(self, write: Write) -> None:
        """A config alone makes no checkpoint of bitsandbytes."""
        folder = write(LLAMA, "nf4")
        config = Path(folder) / "source" / "config.json"
        config.write_text((Path(folder) / "config.json").read_text())
        with pytest.raises(ValueError, match=r"no matrix in the files is bitsandbytes': remove it from config\.json"):
            LLM(f"{folder}/source", **OPTIONS)

    def test_another_option(self, write: Write) -> None:
        with pytest.raises(ValueError, match="quantization='int4': the checkpoint's matrices are in FP4 already"):
            LLM(write(LLAMA, "fp4"), **OPTIONS, quantization="int4")


def state_of(stored: Tensor, **changes: Any) -> Tensor:
    """Return a quant_state with other entries."""
    return torch.tensor(list(json.dumps({**json.loads(bytes(stored.tolist())), **changes}).encode())).byte()
