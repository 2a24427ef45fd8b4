"""What a quantization_config may hold that is no such setting, and tensors that do not fit what it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, build
from cases.layouts import PUBLISHED, compressed
from safetensors.torch import load_file, save_file
from test_four_bits import OPTIONS, write_checkpoint
from torch import Tensor
from transformers import PretrainedConfig

from nanoinfer import LLM
from nanoinfer.weights.formats.formats import Formats
from nanoinfer.weights.formats.plain.format import PLAIN
from nanoinfer.weights.formats.table import read_formats
from nanoinfer.weights.shards import Section

GPTQ, AWQ, ROUND, MODELOPT = (PUBLISHED[name].config for name in ("gptq", "awq", "auto-round", "modelopt"))
COMPRESSED = PUBLISHED["int4 groups"].config
FP8 = {"quant_method": "fp8"}


def read(config: dict[str, Any]) -> Formats:
    return read_formats(PretrainedConfig(quantization_config=config))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**COMPRESSED, "config_groups": ["x"]}, r"config_groups=\['x'\]: must be a mapping"),
        ({**COMPRESSED, "config_groups": {"group_0": None}}, r"config_groups\['group_0'\]=None: must be a mapping"),
        ({**COMPRESSED, "config_groups": {"group_0": {"weights": 4}}}, "weights=4: must be a mapping"),
        ({**COMPRESSED, "ignore": "lm_head"}, "ignore='lm_head': must be a list of names"),
        ({**COMPRESSED, "ignore": [1]}, r"ignore=\[1\]: must be a list of names"),
        ({**COMPRESSED, "ignore": ["re:("]}, r"names modules by '\(', which is no regular expression: missing \)"),
        (
            compressed("nvfp4-pack-quantized", type="float", num_bits=4, group_size=[16]),
            r".* and weights=.*must be 8-bit floa",
        ),
        (
            compressed("pack-quantized", type="int", num_bits=4.0, strategy="channel"),
            r".* and weights=.*must be 8-bit floats",
        ),
        (
            compressed("float-quantized", type="float", num_bits=8, strategy=[]),
            r"strategy=\[\]: must be 'tensor', 'cha",
        ),
        ({**GPTQ, "dynamic": ["x"]}, r"dynamic=\['x'\]: must be a mapping"),
        ({**GPTQ, "dynamic": {"+:x": 8}}, r"dynamic\['\+:x'\]=8: must be a mapping"),
        ({**GPTQ, "dynamic": {"-:(": {}}}, r"names modules by '\(', which is no regular expression"),
        ({**GPTQ, "bits": 4.0}, "bits=4.0: must be 4 or 8"),
        ({**AWQ, "modules_to_not_convert": 1}, "modules_to_not_convert=1: must be a list of names"),
        ({**ROUND, "extra_config": {"x": 16}}, r"extra_config\['x'\]=16: must be a mapping"),
        ({**ROUND, "packing_format": []}, r"packing_format=\[\]: must be one of auto_round:auto_awq"),
        ({**MODELOPT, "exclude_modules": "lm_head"}, "exclude_modules='lm_head': must be a list of names"),
        (
            {**MODELOPT, "quant_algo": "MIXED_PRECISION", "quantized_layers": {"x": "FP8"}},
            r"quantized_layers\['x'\]='FP8': must be a mapping",
        ),
        ({**FP8, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert='lm_head': must be a list of names"),
    ],
)
def test_configs(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"model: quantization_config (has )?{message}"):
        read(config)


def build_checkpoint(name: str, folder: Path) -> Path:
    """Write a checkpoint in a published format; returns the folder of what was rounded."""
    case, source = CASES["qwen3"], folder / "source"
    build(type(case)(case.architecture, case.model_type, {"hidden_size": 64, "intermediate_size": 96}), source)
    write_checkpoint(source, folder, PUBLISHED[name])
    return source


def group_at(place: int, group: int) -> Any:
    def changed(groups: Tensor) -> Tensor:
        groups[place] = group
        return groups

    return changed


@pytest.mark.parametrize(
    ("name", "end", "change", "message"),
    [
        ("gptq", "scales", lambda one: one.to(torch.uint8), "{} has numbers of type U8: must be one of BF16, F16, F32"),
        ("mxfp4", "weight_scale", lambda one: one.float(), "{} has numbers of type F32: must be one of U8"),
        ("modelopt", "weight_scale", lambda one: one.float(), "{} has numbers of type F32: must be one of F8_E4M3"),
        ("gptq act order", "g_idx", group_at(5, -1), "{}: it has the group -1: must be from 0 to 2"),
        ("gptq act order", "g_idx", group_at(95, 3), "{}: it has the group 3: must be from 0 to 2"),
    ],
)
def test_tensors(name: str, end: str, change: Any, message: str, tmp_path: Path) -> None:
    build_checkpoint(name, tmp_path)
    file, changed = tmp_path / "model.safetensors", f"model.layers.1.mlp.down_proj.{end}"
    tensors = load_file(file)
    tensors[changed] = change(tensors[changed])
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match=message.format(changed)):
        LLM(str(tmp_path), **OPTIONS)


class TestWhichModules:
    """What no rule of a config names."""

    @pytest.mark.parametrize("config", [GPTQ, AWQ, ROUND], ids=["gptq", "awq", "auto-round"])
    def test_tools_that_quantize_layers(self, config: dict[str, Any]) -> None:
        formats = read(config)
        assert formats.of("model.layers.0.mlp.up_proj").name == formats.quantized[0].name
        assert formats.of("model.language_model.layers.0.mlp.up_proj") != PLAIN
        assert formats.of("model.per_layer_model_projection") == formats.of("lm_head") == PLAIN

    def test_a_head_in_gptq(self) -> None:
        assert read({**GPTQ, "lm_head": True}).of("lm_head") != PLAIN

    @pytest.mark.parametrize("blocks", ["model.layers.1,model.layers.2", ["model.layers.1", "model.layers.2"]])
    @pytest.mark.parametrize("name", ["block_name_to_quantize", "to_quant_block_names"])
    def test_blocks_of_auto_round(self, name: str, blocks: str | list[str]) -> None:
        formats = read({**ROUND, name: blocks, "extra_config": {"model.layers.0.mlp.up_proj": {"bits": 8}}})
        found = [formats.of(f"model.layers.{layer}.mlp.down_proj") == PLAIN for layer in (0, 1, 2, 10)]
        assert found == [True, False, False, True]
        assert formats.of("model.layers.0.mlp.up_proj") != PLAIN

    def test_settings_that_differ_where_matrices_are_one(self) -> None:
        formats = read({**ROUND, "extra_config": {"a": {"bits": 8}, "b": {"bits": 4}}})
        told = "a is in AutoRound and b in AutoRound: must be of the same bits and groups"
        with pytest.raises(ValueError, match=told):
            formats.make_matrix([Section(name, 8, (8, 64), 0) for name in "ab"], 64, False)


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("name", ["int4 groups", "gptq"])
def test_a_matrix_comes_in_one_form(name: str, is_first: bool, tmp_path: Path, make_llm: Callable[..., LLM]) -> None:
    """In its format, or in plain numbers, which are rounded."""
    source = build_checkpoint(name, tmp_path)
    llm = make_llm(str(tmp_path), **OPTIONS)
    module = "model.layers.1.mlp.down_proj."
    tensors = load_file(tmp_path / "model.safetensors")
    stored = {name: tensor for name, tensor in tensors.items() if name.startswith(module)}
    plain = {f"{module}weight": load_file(source / "model.safetensors")[f"{module}weight"]}
    both = {**plain, **stored} if is_first else {**stored, **plain}
    with pytest.raises(ValueError, match=rf"named_tensors do not fit the model: .*stored twice: {module}"):
        llm.update_weights(both, partial=True)
    save_file({**tensors, **plain}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=rf"the checkpoint does not fit the model: stored twice: {module}"):
        LLM(str(tmp_path), **OPTIONS)


def test_plain_numbers_where_the_config_says_otherwise(tmp_path: Path, make_llm: Callable[..., LLM]) -> None:
    """A checkpoint's other modules are as its config says; an update may be rounded."""
    source = build_checkpoint("int4 groups", tmp_path)
    llm = make_llm(str(tmp_path), **OPTIONS)
    module, tensors = "model.layers.1.mlp.down_proj.", load_file(tmp_path / "model.safetensors")
    plain = {f"{module}weight": load_file(source / "model.safetensors")[f"{module}weight"]}
    llm.update_weights(plain, partial=True)
    others = {name: tensor for name, tensor in tensors.items() if not name.startswith(module)}
    save_file({**others, **plain}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=rf"{module}weight: its numbers are plain, but .* in int4"):
        LLM(str(tmp_path), **OPTIONS)


def test_groups_of_other_sizes_in_an_update(tmp_path: Path, make_llm: Callable[..., LLM]) -> None:
    build_checkpoint("gptq act order", tmp_path)
    llm = make_llm(str(tmp_path), **OPTIONS)
    name = "model.layers.1.mlp.down_proj.g_idx"
    with pytest.raises(RuntimeError, match=r"layers.1.mlp.down_proj: its groups \(g_idx\) are not of one size, which"):
        llm.update_weights({name: torch.zeros(96, dtype=torch.int32)}, partial=True)
