"""Adapters of one small model: PEFT's settings and names, slots, and what bad input gets."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, build
from cases.adapters import MAX_RANK, Rank, adapt
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from nanoinfer.weights.adapters.bases import slot_rank
from nanoinfer.weights.adapters.config import READ, REFUSED, read_config
from nanoinfer.weights.adapters.low_rank import LowRank
from nanoinfer.weights.adapters.slots import Slots, clear, write
from nanoinfer.weights.adapters.source import open_adapter

peft = pytest.importorskip("peft", reason="needs peft: pip install -e '.[trl]'")

LAYER = "model.layers.1."
Q, A, B = f"{LAYER}self_attn.q_proj", f"{LAYER}self_attn.q_proj.lora_A.weight", f"{LAYER}self_attn.q_proj.lora_B.weight"
TENSORS = {A: torch.ones(4, 48), B: torch.ones(64, 4)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("qwen3") / "base"


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return build(CASES["qwen3"], folder)


@pytest.fixture(scope="module")
def ours(model: PreTrainedModel, folder: Path) -> Rank:
    return Rank(folder)


def product(rank: Rank, *source: Any, **how: Any) -> list[Tensor]:
    """What an adapter adds to the rank's matrices."""
    write(rank.reader.read(open_adapter("tuned", *source, **how)), 0, rank.slots)
    return rank.added(0)


def test_an_iterator_may_give_one_memory_again_and_again(ours: Rank) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{LAYER}self_attn.{name}.lora_{half}.weight": torch.randn(shape, generator=generator)
        for name in ("q_proj", "o_proj")
        for half, shape in (("A", (4, 48 if name == "q_proj" else 64)), ("B", (64 if name == "q_proj" else 48, 4)))
    }
    memory = torch.empty(64 * 4)

    def gathered() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors.items():
            yield name, memory[: tensor.numel()].view_as(tensor).copy_(tensor)

    assert all_close(product(ours, gathered(), alpha=4), product(ours, tensors, alpha=4))


def test_the_next_adapter_of_a_form_is_checked_too(ours: Rank) -> None:
    """Whatever the last one was: its numbers, or its shapes and settings if they differ."""
    first = product(ours, TENSORS, alpha=4)
    assert all_close(product(ours, {A: TENSORS[A] * 3, B: TENSORS[B]}, alpha=4), [3 * added for added in first])
    assert all_close(product(ours, TENSORS, alpha=8), [2 * added for added in first])
    assert all_close(product(ours, {B: TENSORS[B], A: TENSORS[A]}, alpha=4), first)
    with pytest.raises(ValueError, match=f"adapter='tuned': {Q} has numbers that are NaN"):
        product(ours, {B: TENSORS[B], A: TENSORS[A] * float("nan")}, alpha=4)
    with pytest.raises(ValueError, match="the adapter may be another model's"):
        product(ours, {B: TENSORS[B], A: torch.ones(4, 47)}, alpha=4)
    with pytest.raises(ValueError, match="must be floats of 16 bits or more"):
        product(ours, {B: TENSORS[B], A: TENSORS[A].long()}, alpha=4)
    with pytest.raises(ValueError, match="target_modules leave it out"):
        product(ours, {B: TENSORS[B], A: TENSORS[A]}, config={"r": 4, "target_modules": ["k_proj"]})
    assert all_close(ours.added(0), first)


def all_close(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.allclose(one, other, atol=1e-5) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "mlp.down_proj"], "use_rslora": True},
        {
            "target_modules": "all-linear",
            "rank_pattern": {"q_proj": 7, r"layers\.1\.mlp\.down_proj": 2, "^model.layers.0.self_attn.v_proj": 3},
            "alpha_pattern": {r".*\.(k|v)_proj": 1, "q_proj": 20},
        },
        {"target_modules": r".*layers\.[02]\..*(up|o)_proj", "fan_in_fan_out": True},
        {"target_modules": ["q_proj", "up_proj", "lm_head"], "exclude_modules": ["layers.1.self_attn.q_proj"]},
        {"target_modules": ["q_proj", "up_proj"], "exclude_modules": r".*layers\.(1|2)\..*"},
        {"target_modules": ["q_proj"], "layers_to_transform": 2},
        {"target_modules": ["k_proj"], "layers_to_transform": [0, 3], "layers_pattern": "layers"},
        {
            "target_modules": ["gate_proj"],
            "target_parameters": ["q_proj.weight", "up_proj.weight"],
            "exclude_modules": ["layers.2.mlp.gate_proj", "q_proj"],
            "rank_pattern": {"q_proj": 7, r".*up_proj\.weight": 3},
            "alpha_pattern": {"up_proj": 1, "gate_proj": 2, "layers.0.self_attn.q_proj.weight": 9},
        },
    ],
    ids=lambda settings: ", ".join(settings),
)
def test_settings(settings: dict[str, Any], model: PreTrainedModel, folder: Path, ours: Rank, tmp_path: Path) -> None:
    """PEFT's merged model has what the adapter adds."""
    wrapped = adapt(copy.deepcopy(model), **settings)
    wrapped.save_pretrained(tmp_path / "adapter")
    wrapped.merge_and_unload().save_pretrained(tmp_path / "merged")
    before, after = ours.weights(folder), ours.weights(tmp_path / "merged")
    expected = [new - old for old, new in zip(before, after, strict=True)]
    assert any(one.any() for one in expected)
    assert all_close(product(ours, tmp_path / "adapter"), expected)


def test_each_setting_of_peft_is_known() -> None:
    """Those that train alone are taken at any value, as PEFT writes them."""
    trained = {"lora_dropout": 0.1, "megatron_core": "x", "init_lora_weights": "gaussian", "ensure_weight_tying": True}
    assert read_config(peft.LoraConfig(r=4, velora_config={}, **trained), "adapter").rank == 4
    known = {*READ, *REFUSED}
    assert {field.name for field in dataclasses.fields(peft.LoraConfig)} <= known


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "layers.1.mlp.up_proj", "model.layers.3.self_attn.v_proj"]},
        {"target_modules": ["q_proj", f"{LAYER}mlp.up_proj"], "layers_to_transform": [0, 2]},
        {"target_modules": ["q_proj"], "layers_to_transform": [2], "layers_pattern": ["blocks", "layers"]},
        {"target_modules": ["q_proj"], "layers_to_transform": [2], "layers_pattern": ["blocks"]},
        {"target_modules": ["q_proj"], "layers_to_transform": []},
        {"target_modules": r".*\.(q|k)_proj", "exclude_modules": ["layers.0.self_attn.q_proj", "k_proj"]},
        {"target_modules": r"q_proj"},
        {"target_modules": ["down_proj", "1.up_proj"]},
    ],
)
def test_which_modules_are_targets(settings: dict[str, Any]) -> None:
    """They are those that PEFT finds."""
    config, theirs = read_config(settings, "adapter"), peft.LoraConfig(**settings)
    names = [f"model.layers.{layer}.{name}" for layer in range(4) for name in ("self_attn.q_proj", "self_attn.k_proj")]
    names += [f"model.layers.{layer}.mlp.experts.{layer}.up_proj" for layer in range(4)]
    names += [f"model.layers.{layer}.mlp.up_proj" for layer in range(4)]
    names += ["lm_head", "q_proj", "model.layers.3.self_attn.v_proj", "model.blocks.2.self_attn.q_proj"]
    found = peft.tuners.tuners_utils.check_target_module_exists
    assert [config.targets(name) for name in names] == [bool(found(theirs, name)) for name in names]


class TestNames:
    """PEFT's files, a trainer's own tensors, and other wrappers name the same modules differently."""

    @pytest.fixture(scope="class")
    def saved(self, model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("adapter")
        adapt(copy.deepcopy(model), target_modules=["q_proj", "up_proj", "lm_head"]).save_pretrained(folder)
        return folder

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ("base_model.model.", ""),
            ("_A.weight", "_A.default.weight"),
            ("base_model.model.model.", "base_model.model."),
            ("base_model.model.model.layers", "base_model.model.model.language_model.layers"),
            ("base_model.model.model.layers", "base_model.model.language_model.model.layers"),
            ("base_model.model.lm_head", "base_model.model.language_model.lm_head"),
        ],
    )
    def test_spellings(self, old: str, new: str, saved: Path, ours: Rank) -> None:
        expected = product(ours, saved)
        tensors = load_file(saved / "adapter_model.safetensors")
        renamed = {name.replace(old, new): tensor for name, tensor in tensors.items()}
        assert renamed.keys() != tensors.keys()
        assert all_close(product(ours, renamed, alpha=6), expected)

    def test_a_trainers_own_tensors(self, model: PreTrainedModel, ours: Rank, tmp_path: Path) -> None:
        wrapped = adapt(copy.deepcopy(model), target_modules=["q_proj", "up_proj"], use_rslora=True)
        wrapped.save_pretrained(tmp_path)
        expected, config = product(ours, tmp_path), wrapped.peft_config["default"]
        assert all_close(product(ours, peft.get_peft_model_state_dict(wrapped), config=config), expected)
        trained = [pair for pair in wrapped.named_parameters() if "lora_" in pair[0]]
        assert all_close(product(ours, trained, config=config.to_dict()), expected)

    def test_each_expert_by_itself(self, tmp_path: Path) -> None:
        """As adapters of older versions of transformers have them."""
        build(CASES["qwen3moe"], tmp_path)
        rank, expert = Rank(tmp_path), "model.layers.1.mlp.experts.2."
        a, b = torch.randn(3, 48), torch.randn(48, 3)
        size = next(iter(rank.bases.of_experts)).sizes.size
        tensors = {
            f"{expert}up_proj.lora_A.weight": a,
            f"{expert}up_proj.lora_B.weight": torch.ones(size, 3),
            f"{expert}down_proj.lora_A.weight": torch.ones(3, size),
            f"{expert}down_proj.lora_B.weight": b,
        }
        changed = [added for added in product(rank, tensors, alpha=3) if added.any()]
        up, down = torch.ones(size, 3) @ a, b @ torch.ones(3, size)
        assert all_close(changed, [torch.cat([torch.zeros_like(up), up]), down])


class TestSlots:
    def test_a_smaller_adapter_takes_the_place_of_a_larger_one(self, ours: Rank) -> None:
        assert slot_rank(MAX_RANK) == 32
        output = f"{LAYER}self_attn.o_proj.lora_"
        both = {f"{output}A.weight": torch.ones(9, 64), f"{output}B.weight": torch.ones(48, 9)}
        large = product(ours, {**both, A: torch.ones(9, 48), B: torch.ones(64, 9)}, alpha=9)
        small = product(ours, TENSORS, alpha=4)
        assert [int(added.any()) for added in large].count(1) == 2
        assert [float(added.max()) for added in small if added.any()] == [4.0]

    def test_others_stay_and_an_empty_one_adds_nothing(self, ours: Rank) -> None:
        expected = product(ours, TENSORS, alpha=4)
        other = open_adapter("other", {A: torch.ones(2, 48), B: torch.ones(64, 2)}, alpha=1)
        write(ours.reader.read(other), 1, ours.slots)
        assert all_close(ours.added(0), expected)
        clear(1, ours.slots)
        assert all_close(ours.added(0), expected)
        assert ours.is_empty(1)

    @pytest.mark.parametrize("rank", [4, slot_rank(MAX_RANK)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_b_is_scaled_in_float32_and_rounded_once(self, dtype: torch.dtype, rank: int, ours: Rank) -> None:
        """Whatever numbers the adapter has, the slots are of 16 bits."""
        slots = [Slots(one.base, one.a.bfloat16(), one.b.bfloat16()) for one in ours.slots]
        b = torch.randn(64, rank).to(dtype)
        write({Q: LowRank(torch.ones(rank, 48), b, 1.3 / 4)}, 0, slots)
        (written,) = (one.b[0, :64, :rank] for one in slots if one.b[0].any())
        assert torch.equal(written, (b.float() * (1.3 / 4)).bfloat16())

    @pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
    def test_a_base_of_another_format_has_the_same(self, quantization: str, folder: Path, ours: Rank) -> None:
        rank = Rank(folder, quantization=quantization)
        assert list(rank.bases) == list(ours.bases)


def test_routers_are_refused_by_name(tmp_path: Path) -> None:
    """PEFT's "all-linear" adapts them, whatever exclude_modules says."""
    wrapped = adapt(build(CASES["qwen3moe"], tmp_path / "base"), target_modules="all-linear", exclude_modules=".*gate")
    wrapped.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model.layers.0.mlp.gate weighs experts.*list of projections.* merge it"):
        Rank(tmp_path / "base").reader.read(open_adapter("tuned", tmp_path))


class TestBadInput:
    @pytest.mark.parametrize(
        ("tensors", "message"),
        [
            ({}, "has no tensors named lora_A and lora_B"),
            ({A: TENSORS[A]}, f"must have both lora_A and lora_B .* is there: {A}"),
            ({**TENSORS, A: torch.ones(4, 32)}, rf"{A} of shape \[4, 32\] .* needs \[r, 48\] and \[64, r\].*another"),
            ({**TENSORS, B: torch.ones(64, 3)}, r"needs \[r, 48\] and \[64, r\]"),
            ({**TENSORS, A: torch.ones(0, 48), B: torch.ones(64, 0)}, r"needs \[r, 48\]"),
            ({**TENSORS, A: torch.tensor(1.0)}, r"needs \[r, 48\]"),
            ({A: torch.ones(21, 48), B: torch.ones(64, 21)}, f"{Q} has rank 21, but max_adapter_rank=20: .* least 21"),
            ({**TENSORS, B: torch.full((64, 4), torch.nan)}, f"{Q} has numbers that are NaN or infinite"),
            ({**TENSORS, A: TENSORS[A].int()}, f"{A} has numbers of torch.int32: must be floats"),
            (
                {**TENSORS, f"base_model.model.{A}": TENSORS[A]},
                f"base_model.model.{A} and {A} are both the lora_A of {Q}",
            ),
            (
                {**TENSORS, **{name.replace("model.layers", "layers"): one for name, one in TENSORS.items()}},
                f"are a second adapter of {Q}",
            ),
            (
                {name.replace("q_proj", "query"): tensor for name, tensor in TENSORS.items()},
                f"{LAYER}self_attn.query is no matrix .*; such are {LAYER}self_attn.q",
            ),
            (
                {name.replace("layers.1.", "layers.7."): tensor for name, tensor in TENSORS.items()},
                r"model.layers.7.self_attn.q_proj is no matrix .*; such are model.layers.\d.self_attn.q_proj",
            ),
            (
                {f"model.visual.blocks.0.attn.qkv.lora_{half}.weight": torch.ones(2, 2) for half in "AB"},
                "model.visual.blocks.0.attn.qkv is not of the language model, .* exclude_modules",
            ),
            (
                {f"model.embed_tokens.lora_{half}.weight": torch.ones(2, 2) for half in "AB"},
                "model.embed_tokens is an embedding, .* merge",
            ),
            ({"model.embed_tokens.lora_embedding_A": torch.ones(2, 2)}, "is the adapter of an embedding, .* merge"),
            ({**TENSORS, f"{Q}.lora_magnitude_vector.weight": torch.ones(64)}, "is scales of DoRA, .* merge"),
            ({**TENSORS, f"{Q}.lora_B.bias": torch.ones(64)}, "is a bias, .* merge"),
            (
                {**TENSORS, "lm_head.weight": torch.ones(160, 48)},
                "lm_head.weight is neither lora_A nor lora_B, .* merge",
            ),
            ([(A, "number")], "source has .*must be pairs"),
            ({**TENSORS, A: torch.ones(4, 48).double() * 1e300}, f"{Q} has numbers of up to 1e.300: must be at most"),
            ({**TENSORS, B: torch.ones(64, 4) * 1e38}, f"{Q} has numbers of up to 1e.38 times 4, its alpha by its"),
            ({**TENSORS, A: TENSORS[A].to("meta")}, f"source: {A} has no numbers to copy: .* on meta"),
        ],
    )
    def test_tensors(self, tensors: Any, message: str, ours: Rank) -> None:
        with pytest.raises(ValueError, match=rf"adapter='tuned': .*{message}"):
            ours.reader.read(open_adapter("tuned", tensors, alpha=16))

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"peft_type": "IA3"}, "peft_type='IA3': must be 'LORA'"),
            ({"bias": "lora_only"}, "bias='lora_only': must be 'none'"),
            ({"use_dora": True}, "use_dora=True: .*DoRA.*merge"),
            ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]"),
            ({"trainable_token_indices": [3]}, r"trainable_token_indices=\[3\]"),
            ({"lora_bias": True}, "lora_bias=True"),
            ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4'.*path_initial_model"),
            ({"init_lora_weights": "unheard"}, "init_lora_weights='unheard': must be a flag, or one of gaussian, eva"),
            ({"unheard_of": 1}, "its config has unheard_of=1: nothing reads it here; known are peft_type"),
            ({"r": 5}, f"{Q} has rank 4, but the config says 5"),
            ({"r": 4, "rank_pattern": {"q_proj": 2}}, f"{Q} has rank 4, but the config says 2"),
            ({"r": 0}, "r=0: must be an integer of at least 1"),
            ({"r": 4, "lora_alpha": float("inf")}, "lora_alpha=inf: must be a number"),
            ({"r": 4, "lora_alpha": "much"}, "lora_alpha='much': must be a number"),
            ({"r": 4, "target_modules": ["k_proj"]}, f"{Q} has tensors, but the config's target_modules leave it out"),
            ({"target_modules": "*q_proj"}, r"target_modules='\*q_proj': must be a list of names or a regular expr"),
            ({"target_modules": [1]}, r"target_modules=\[1\]: must be a list of names"),
            ({"rank_pattern": ["q_proj"]}, r"rank_pattern=\['q_proj'\]: must be a mapping"),
            ({"alpha_pattern": {"(": 1}}, r"alpha_pattern has '\(': must be a name or a regular expression"),
            ({"layers_to_transform": ["first"]}, "layers_to_transform='first': must be an integer"),
            ({"rank_pattern": {"(?i)q_proj": 4}}, r"rank_pattern has '\(\?i\)q_proj': must be .* global flags"),
            ({"rank_pattern": {3: 4}}, "rank_pattern has 3: must be a name or a regular expression"),
            ({"target_modules": "q{99999999999}"}, r"target_modules='q\{9+\}': must be .* expression: the rep"),
            ({"layers_pattern": "["}, r"layers_pattern has '\[': must be a name or a regular expression"),
            ("lora", "config='lora': must be a mapping as in adapter_config.json, or LoraConfig"),
            (peft.LoraConfig, r"config=<class .*>: must be a mapping .* or LoraConfig\(\.\.\.\): its to_dict fails"),
        ],
    )
    def test_settings(self, settings: Any, message: str, ours: Rank) -> None:
        with pytest.raises(ValueError, match=rf"adapter='tuned': {message}"):
            ours.reader.read(open_adapter("tuned", TENSORS, config=settings))

    def test_numbers_that_its_dtype_does_not_hold(self, model: PreTrainedModel, folder: Path) -> None:
        source = open_adapter("tuned", {**TENSORS, B: torch.full((64, 4), 40000.0)}, alpha=8)
        assert Rank(folder).reader.read(source).keys() == {Q}
        with pytest.raises(ValueError, match=f"{Q} has numbers of up to 4e.04 times 2, .* 6.55e.04, for torch.float16"):
            Rank(folder, slots=torch.float16).reader.read(source)

    def test_tensors_without_settings(self, ours: Rank) -> None:
        with pytest.raises(ValueError, match="adapter='tuned': tensors need either config"):
            ours.reader.read(open_adapter("tuned", TENSORS))

    def test_experts_of_other_sizes(self, tmp_path: Path) -> None:
        build(CASES["qwen3moe"], tmp_path)
        tensors = {f"model.layers.0.mlp.experts.lora_{half}.weight": torch.ones(12, 12) for half in "AB"}
        with pytest.raises(
            ValueError, match=r"the experts of this model have .* inputs and .* outputs; .* another model"
        ):
            Rank(tmp_path).reader.read(open_adapter("tuned", tensors, alpha=16))

    def test_stacks_of_one_shape(self, tmp_path: Path) -> None:
        """Experts without gates may be as wide as their inputs."""
        case = CASES["nemotronh experts"]
        build(dataclasses.replace(case, settings={**case.settings, "moe_intermediate_size": 48}), tmp_path)
        shapes = {"A": (6 * 2, 48), "B": (48, 6 * 2)}
        tensors = {
            f"model.layers.1.mixer.experts.lora_{half}.weight": torch.ones(shape) for half, shape in shapes.items()
        }
        with pytest.raises(ValueError, match=r"fit both up_proj and down_proj, .* name the projections of each expert"):
            Rank(tmp_path).reader.read(open_adapter("tuned", tensors, alpha=16))

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (lambda folder: (folder / "adapter_config.json").unlink(), "it has adapter_model.safetensors"),
            (lambda folder: (folder / "adapter_model.safetensors").unlink(), "it has adapter_config.json"),
            (lambda folder: (folder / "adapter_config.json").write_text("{"), "adapter_config.json: cannot be read"),
            (lambda folder: (folder / "adapter_config.json").write_text("[]"), r"config=\[\]: must be a mapping"),
            (lambda folder: (folder / "adapter_config.json").write_text("[" * 99999), "config.json: cannot be read"),
            (lambda folder: (folder / "adapter_model.safetensors").write_text("{"), "safetensors: cannot be read"),
        ],
    )
    def test_folders(self, damage: Callable[[Path], object], message: str, ours: Rank, tmp_path: Path) -> None:
        (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8}))
        save_file(TENSORS, tmp_path / "adapter_model.safetensors")
        assert ours.reader.read(open_adapter("tuned", str(tmp_path))).keys() == {Q}
        with pytest.raises(ValueError, match="config and alpha must be None"):
            ours.reader.read(open_adapter("tuned", tmp_path, alpha=2))
        damage(tmp_path)
        with pytest.raises(ValueError, match=f"^adapter='tuned': .*{message}"):
            ours.reader.read(open_adapter("tuned", tmp_path))

    def test_what_is_no_folder(self, tmp_path: Path) -> None:
        (tmp_path / "adapter_model.safetensors").touch()
        for source, message in (
            ("/no/folder", "no such folder, nor is it a Hugging Face Hub id such as 'owner/adapter'"),
            (tmp_path / "adapter_model.safetensors", "is a file; give the folder that holds the adapter's files"),
        ):
            with pytest.raises(ValueError, match=f"^adapter='tuned': source='{source}': {message}$"):
                open_adapter("tuned", source)
