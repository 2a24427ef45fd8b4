"""The rotations of a transform_config, which compressed-tensors fuses into weights, or applies when they multiply."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, build
from cases.layouts import PUBLISHED
from conftest import greedy
from safetensors.torch import save_file
from test_four_bits import write_checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from nanoinfer import LLM, reference
from nanoinfer.kernels.linear.operands.hadamard import hadamard, signs
from nanoinfer.weights.formats.rotated.format import RotatedFormat
from nanoinfer.weights.formats.rotated.matrix import Side
from nanoinfer.weights.formats.table import quantized_as_loaded, read_formats

pytest.importorskip("compressed_tensors", reason="needs compressed-tensors: pip install -e '.[test]'")

from compressed_tensors.transform import TransformConfig, apply_transform_config
from compressed_tensors.transform.utils.hadamard import deterministic_hadamard_matrix

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = {"device": "cpu", "kvcache_block_size": 16, "max_model_len": 64}
SIZES = {"hidden_size": 64, "intermediate_size": 128}
PROMPTS = [[7], list(range(20, 44)), [5, 6] * 9]
QKV, DOWN = [r"re:.*\.(q|k|v)_proj$"], [r"re:.*\.down_proj$"]
INVERSE = {"inverse": True}


def place(location: str, targets: str | list[str], **others: Any) -> dict[str, Any]:
    return {"location": location, "targets": targets, **others}


def scheme(*apply: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"type": "hadamard", "apply": list(apply), **others}


SPINQUANT = {  # R1 and R2 are in the weights, and R4 rotates when they multiply
    "R1": scheme(
        place("weight_output", [r"re:.*embed_tokens$", r"re:.*o_proj$", *DOWN]),
        place("weight_input", [*QKV, r"re:.*(gate|up)_proj$", "lm_head"], **INVERSE),
        precision="torch.float64",
    ),
    "R2": scheme(
        place("weight_output", [r"re:.*v_proj$"]), place("weight_input", [r"re:.*o_proj$"], **INVERSE), head_dim=16
    ),
    "R4": scheme(place("input", DOWN), place("weight_input", DOWN, **INVERSE), precision="torch.float64"),
}
QUIP = {  # each matrix is between two rotations
    "v": scheme(
        place("input", "Linear", ignore="lm_head"), place("weight_input", "Linear", ignore="lm_head", **INVERSE)
    ),
    "u": scheme(
        place("weight_output", "Linear", ignore="lm_head"), place("output", "Linear", ignore="lm_head", **INVERSE)
    ),
}
IN_BLOCKS = {name: {**one, "head_dim": 8} for name, one in QUIP.items()}
ONLINE = {"x": scheme(place("input", QKV, ignore=[r"re:.*layers\.0\."]), place("output", [*QKV, *DOWN]), head_dim=4)}
LAST = {"head": scheme(place("input", ["lm_head"]))}


def config_of(groups: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "config_groups": {},
        "transform_config": {"config_groups": groups},
        **others,
    }


class Checkpoint:
    """A checkpoint with rotations, and compressed-tensors' own model of it."""

    def __init__(self, groups: dict[str, Any], folder: Path, case: str = "qwen2") -> None:
        """groups: those of the transform_config"""
        self.folder, source = str(folder), folder / "source"
        own = CASES[case]
        build(type(own)(own.architecture, own.model_type, {**SIZES, "tie_word_embeddings": False}), source)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        apply_transform_config(self.model, TransformConfig(config_groups=groups))
        settings = json.loads((source / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**settings, "quantization_config": config_of(groups)}))
        self.tensors = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.save()

    def save(self) -> None:
        save_file(self.tensors, Path(self.folder) / "model.safetensors", {"format": "pt"})

    @torch.inference_mode()
    def logprobs(self, ids: list[int]) -> Tensor:
        return self.model(torch.tensor([ids])).logits[0].log_softmax(-1)

    def turn_dense(self, groups: dict[str, Any]) -> None:
        """Let the model have what quantized weights stand for, and the rotations of these groups."""
        self.model = AutoModelForCausalLM.from_pretrained(Path(self.folder) / "dense", dtype=torch.float32)
        apply_transform_config(self.model, TransformConfig(config_groups=groups))

    def check(self, llm: LLM, adapter: str | None = None) -> None:
        outputs = llm.generate(PROMPTS, greedy(4, logprobs=0, adapter=adapter), use_tqdm=False)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            ids = [*prompt, *output.token_ids]
            expected = self.logprobs(ids)[len(prompt) - 1 : -1]
            assert output.token_ids == expected.argmax(-1).tolist()
            found = [of_token[token].logprob for of_token, token in zip(output.logprobs, output.token_ids, strict=True)]
            assert found == pytest.approx(expected.amax(-1).tolist(), abs=1e-4)


def test_sylvesters_matrix() -> None:
    expected = deterministic_hadamard_matrix(64, torch.float32)
    assert torch.equal(signs(range(64), 64, torch.device("cpu")), expected)
    assert torch.equal(signs(range(3, 9), 64, torch.device("cpu")), expected[3:9])
    x = torch.randn(5, 192)
    rotated = (x.unflatten(1, (3, 64)) @ expected / 8).flatten(1)
    torch.testing.assert_close(hadamard(x, 64), rotated)
    torch.testing.assert_close(hadamard(hadamard(x, 64), 64), x)
    assert torch.equal(hadamard(x, 64)[2:3], hadamard(x[2:3], 64))


@pytest.mark.parametrize(
    "groups",
    [SPINQUANT, QUIP, IN_BLOCKS, ONLINE, LAST],
    ids=["SpinQuant", "QuIP", "blocks", "online", "head"],
)
def test_compressed_tensors_computes_the_same(
    groups: dict[str, Any], tmp_path: Path, make_llm: Callable[..., LLM]
) -> None:
    checkpoint = Checkpoint(groups, tmp_path)
    assert any(re.search(r"_(in|out)put\.weight$", name) for name in checkpoint.tensors)
    llm = make_llm(checkpoint.folder, **OPTIONS)
    checkpoint.check(llm)
    llm.update_weights(checkpoint.tensors)
    checkpoint.check(llm)


def test_weights_in_four_bits(tmp_path: Path, make_llm: Callable[..., LLM]) -> None:
    """What is rotated is what a product reads, in whatever format the weight is."""
    published = PUBLISHED["int4 groups"]
    checkpoint = Checkpoint({}, tmp_path)
    write_checkpoint(tmp_path / "source", tmp_path, published)
    checkpoint.turn_dense(ONLINE)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["quantization_config"]["transform_config"] = {"config_groups": ONLINE}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    checkpoint.check(make_llm(checkpoint.folder, **OPTIONS))


def test_adapters_are_beside_rotations(tmp_path: Path, make_llm: Callable[..., LLM]) -> None:
    """They read what comes before a rotation, and add to what comes behind one."""
    peft = pytest.importorskip("peft", reason="needs peft: pip install -e '.[trl]'")
    checkpoint = Checkpoint(QUIP, tmp_path)
    llm = make_llm(checkpoint.folder, max_adapters=1, **OPTIONS)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    checkpoint.model = peft.get_peft_model(checkpoint.model, config)
    llm.load_adapter("mine", peft.get_peft_model_state_dict(checkpoint.model), config)
    checkpoint.check(llm, adapter="mine")


def test_the_same_bits_in_any_company(tmp_path: Path, make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(Checkpoint(QUIP, tmp_path).folder, deterministic=True, **OPTIONS)
    params = greedy(4, logprobs=0)
    alone = [llm.generate([prompt], params, use_tqdm=False)[0].logprobs for prompt in PROMPTS]
    assert [output.logprobs for output in llm.generate(PROMPTS, params, use_tqdm=False)] == alone


def test_formats_on_the_fly_keep_rotations() -> None:
    formats = read_formats(PretrainedConfig(quantization_config=config_of(QUIP)))
    (quantized,) = quantized_as_loaded(formats, "int8").quantized
    found = quantized_as_loaded(formats, "int8").of("model.layers.0.mlp.up_proj")
    assert isinstance(found, RotatedFormat)
    assert (found.inner, found.inputs, found.outputs) == (
        quantized,
        Side("v_input.weight", None),
        Side("u_output.weight", None),
    )


class TestRefused:
    @pytest.mark.parametrize(
        ("groups", "message"),
        [
            ({"R": scheme(place("input", DOWN), type="random-hadamard")}, r"\['R'\]={'type': 'random-.*: must be 'h"),
            ({"R": scheme(place("output", DOWN), type="random-matrix")}, r"\['R'\]={'type': 'random-m.*: must be 'h"),
            ({"R": scheme(place("input", DOWN), randomize=True)}, r"'randomize': True}: must be 'hadamard' and not "),
            ({"R": scheme(place("input", ["Embedding"]))}, r"apply=\['Embedding'\]: must be 'Linear', or the names"),
            ({"R": scheme(place("output", [r"re:.*embed_tokens$"]))}, "must be 'Linear', or the names of linear lay"),
            ({"R": scheme(place("k_cache", ["LlamaAttention"]))}, "must be the same for q_attn and k_cache"),
            ({"R": scheme(place("weight", DOWN))}, "location='weight': must be one of weight_input, weight_output"),
            ({"R": scheme(place("input", DOWN), head_dim=2.5)}, "head_dim=2.5: must be an integer above 0"),
            ({"R": scheme(place("input", DOWN), precision="torch.int8")}, "precision='torch.int8': must be 'torch.fl"),
            ({"R": scheme(place("input", 7))}, "targets=7: must be a name or a list of names"),
            ({"R": scheme(place("input", ["re:("]))}, r"names modules by '\(', which is no regular expression"),
            ({"R": scheme(place("input", DOWN), unheard_of=1)}, r"\['R'\] has unheard_of=1: nothing reads it"),
            ({"R": scheme(place("input", DOWN, unheard_of=1))}, "apply has unheard_of=1: nothing reads it"),
        ],
    )  # fmt: skip
    def test_settings(self, groups: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=f"^model: quantization_config.*{message}"):
            read_formats(PretrainedConfig(quantization_config=config_of(groups)))

    @pytest.mark.parametrize(
        ("case", "groups", "message"),
        [
            ("qwen2", {**QUIP, "w": QUIP["v"]}, "rotates a side of model.layers.0.self_attn.q_proj twice: must be"),
            ("qwen2", {"R": scheme(place("input", DOWN), head_dim=12)}, "inputs of .*down_proj in blocks of 12: must"),
            ("qwen2", {"R": scheme(place("input", DOWN), head_dim=256)}, "blocks of 256: must divide the 128 that one"),
            ("qwen2", {"R": scheme(place("input", [r"re:.*q_proj$"]))}, "q_proj is in .* with rotations and .*k_pro"),
            ("phi3", {"R": scheme(place("output", [r"re:.*qkv_proj$"]))}, "outputs of model.layers.0.self_attn.qkv_pr"),
            ("qwen3moe", QUIP, "rotates model.layers.0.mlp.experts.0.gate_proj: must leave out experts"),
        ],
    )  # fmt: skip
    def test_models(self, case: str, groups: dict[str, Any], message: str, tmp_path: Path) -> None:
        own = CASES[case]
        build(type(own)(own.architecture, own.model_type, {**own.settings, **SIZES}), tmp_path)
        settings = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**settings, "quantization_config": config_of(groups)}))
        with pytest.raises(ValueError, match=message):
            LLM(str(tmp_path), **OPTIONS)

    def test_a_head_that_is_the_embedding(self, tmp_path: Path) -> None:
        build(type(CASES["qwen2"])("Qwen2ForCausalLM", "qwen2", {**SIZES, "tie_word_embeddings": True}), tmp_path)
        settings = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**settings, "quantization_config": config_of(LAST)}))
        with pytest.raises(ValueError, match=r"rotates lm_head: .* must have a lm_head\.weight beside"):
            LLM(str(tmp_path), **OPTIONS)

    def test_a_reference(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="rotated inputs or outputs"):
            reference(Checkpoint(QUIP, tmp_path).folder)

    def test_ranks(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="tensor_parallel_size=2: must be 1: the transform_config"):
            LLM(Checkpoint(QUIP, tmp_path).folder, tensor_parallel_size=2, **OPTIONS)

    def test_another_matrix(self, tmp_path: Path) -> None:
        checkpoint = Checkpoint(SPINQUANT, tmp_path)
        checkpoint.tensors["model.layers.1.mlp.down_proj.R4_input.weight"].neg_()
        checkpoint.save()
        with pytest.raises(ValueError, match=r"layers.1.mlp.down_proj.R4_input.weight: must be Sylvester's matrix"):
            LLM(checkpoint.folder, **OPTIONS)


def test_what_is_in_the_weights_asks_for_nothing() -> None:
    """Also queries and keys that are rotated alike, whose products stay."""
    fused = {name: scheme(*one["apply"], type="random-matrix") for name, one in SPINQUANT.items() if name != "R4"}
    scored = {"R3": scheme(*(place(location, ["Qwen2Attention"]) for location in ("q_attn", "k_cache")), head_dim=16)}
    assert read_formats(PretrainedConfig(quantization_config=config_of({**fused, **scored}))).rotations == ()
