"""What a quantization_config may hold that is no such setting, and tensors that do not fit what it says."""

from __future__ import annotations

import copy
import functools
import json
import operator
import shutil
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

from nanoinfer import BUNDLED_MODEL, LLM
from nanoinfer.checkpoint import Checkpoint
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


FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True, "observer": None}
AS_PUBLISHED = {  # with all that the tools write beside what decides
    "compressed-tensors": {
        **COMPRESSED,
        "version": "0.12.2", "quantization_status": "compressed", "global_compression_ratio": None,
        "sparsity_config": {"format": "dense", "ignore": [], "sparsity_structure": "unstructured", "targets": []},
        "kv_cache_scheme": {**FLOAT8, "strategy": "tensor", "dynamic": False, "group_size": None, "actorder": None},
        "config_groups": {"group_0": {
            "targets": ["Linear"], "format": "float-quantized", "output_activations": None,
            "input_activations": {**FLOAT8, "observer_kwargs": {}},
            "weights": {
                **FLOAT8, "strategy": "channel", "dynamic": False, "observer": "minmax", "block_structure": None,
                "group_size": None, "actorder": None, "scale_dtype": None, "zp_dtype": None,
            },
        }},
    },
    "fp8": {
        **FP8, "activation_scheme": "dynamic", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128],
        "dequantize": False,
    },
    "gptq": {
        **GPTQ, "format": "gptq", "pack_dtype": "int32", "lm_head": False, "damp_percent": 0.01, "static_groups": False,
        "true_sequential": True, "model_name_or_path": "x", "model_file_base_name": "model", "is_marlin_format": False,
        "meta": {"quantizer": ["gptqmodel:4.2.5"], "static_groups": False}, "batch_size": 1, "dataset": ["x"],
        "exllama_config": {"version": 1}, "use_exllama": True, "modules_in_block_to_quantize": None, "desc_act": 0,
    },
    "awq": {
        **AWQ, "modules_to_not_convert": None, "backend": "autoawq", "do_fuse": False, "fuse_max_seq_len": None,
        "modules_to_fuse": None, "exllama_config": None,
    },
    "auto-round": {
        **ROUND, "iters": 200, "nsamples": 128, "seqlen": 2048, "low_gpu_mem_usage": True, "act_bits": 16,
        "autoround_version": "0.12.3", "enable_quanted_input": True, "super_bits": None, "super_group_size": None,
        "extra_config": {"lm_head": {"bits": 16, "data_type": "fp"}},
    },
    "modelopt": {
        **MODELOPT, "kv_cache_quant_algo": "FP8", "producer": {"name": "modelopt", "version": "0.37.0"},
        "config_groups": {"group_0": {
            "targets": ["Linear"],
            "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
            "input_activations": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
        }},
    },
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
}  # fmt: skip


@pytest.mark.parametrize("name", AS_PUBLISHED)
def test_what_tools_write(name: str) -> None:
    assert read(AS_PUBLISHED[name]).quantized


def sections(config: dict[str, Any], at: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return where a config has settings: itself, and each mapping in it that holds no names of the user's own."""
    inner = [place for name, one in config.items() if isinstance(one, dict) for place in sections(one, (*at, name))]
    free = at[-1:] and at[-1] in ("config_groups", "extra_config", "dynamic", "meta", "producer", "exllama_config")
    return inner if free else [at, *inner]


PLACES = [
    (name, place)
    for name, config in AS_PUBLISHED.items()
    for place in sections(config)
    if not set(place) & {"observer_kwargs", "exllama_config"}
]


@pytest.mark.parametrize(("name", "place"), PLACES, ids=lambda one: ".".join(one) if isinstance(one, tuple) else one)
def test_an_unknown_setting_anywhere(name: str, place: tuple[str, ...]) -> None:
    config = copy.deepcopy(AS_PUBLISHED[name])
    section = functools.reduce(operator.getitem, place, config)
    for harmless in (None, False, [], {}):
        section["unheard_of"] = harmless
        read(config)
    section["unheard_of"] = 1
    with pytest.raises(
        ValueError, match=r"^model: quantization_config.* has unheard_of=1: nothing reads it here; known"
    ):
        read(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            compressed("float-quantized", type="float", num_bits=8, strategy="channel", dynamic=True),
            "dynamic=True: must",
        ),
        (
            compressed("float-quantized", type="float", num_bits=8, strategy="channel", group_size=128),
            "group_size=128:",
        ),
        (compressed("float-quantized", type="float", num_bits=8, strategy="tensor", symmetric=False), "format='float-"),
        (
            compressed("int-quantized", type="int", num_bits=8, strategy="channel", symmetric=False),
            "format='int-quanti",
        ),
        (compressed("pack-quantized", type="int", num_bits=4, strategy="channel", symmetric="no"), "symmetric='no':"),
        (compressed("pack-quantized", type="int", num_bits=4, strategy="channel", group_size=128), "group_size=128:"),
        (compressed("marlin-24", type="float", num_bits=8, strategy="channel"), "format='marlin-24'"),
        (compressed("x", type="float", num_bits=4, strategy="tensor_group", group_size=16), "format='x'"),
        (
            compressed("nvfp4-pack-quantized", type="float", num_bits=4, strategy="group", group_size=16),
            "strategy='group': must be 'tensor_group'",
        ),
        (
            {**COMPRESSED, "sparsity_config": {"format": "sparse-24-bitmask"}},
            "format='sparse-24-bitmask': must be 'den",
        ),
        ({**COMPRESSED, "moe_sparsity_config": {"method": "prune", "num_experts": [1]}}, "moe_sparsity_config="),
        ({**FP8, "expert_dtype": "fp4"}, "expert_dtype='fp4': must be 'fp8'"),
        ({**FP8, "modules_to_convert": ["embed_tokens"]}, "modules_to_convert="),
        ({**GPTQ, "pack_dtype": "int16"}, "pack_dtype='int16': must be 'int32'"),
        ({**GPTQ, "checkpoint_format": None, "format": "marlin"}, "format='marlin': must be one of gptq, gptq_v2"),
        ({**GPTQ, "adapter": {"name": "lora", "rank": 16}}, "adapter={"),
        ({**GPTQ, "sym": "yes"}, "sym='yes': must be true or false"),
        ({**GPTQ, "dynamic": {"+:x": {"adapter": "lora"}}}, "adapter='lora'"),
        (
            {**GPTQ, "modules_in_block_to_quantize": [[1]]},
            r"modules_in_block_to_quantize=\[\[1\]\]: must be a list of l",
        ),
        ({**AWQ, "backend": "llm-awq"}, "backend='llm-awq': must be 'auto' or"),
        ({**AWQ, "format": "gemv_fast"}, "format='gemv_fast': must be one of gemm"),
        ({**ROUND, "super_bits": 6}, "super_bits=6: nothing reads it here"),
        ({**ROUND, "extra_config": {"x": {"rotation": 1}}}, "rotation=1: nothing reads it here"),
        ({**MODELOPT, "pre_quant_scale": True}, "pre_quant_scale=True: nothing reads it here"),
        ({**MODELOPT, "kv_cache_quant_algo": "X"}, "kv_cache_quant_algo='X': must be 'FP8'"),
        ({**MODELOPT, "kv_cache_scheme": "X"}, "kv_cache_scheme='X': must be a mapping"),
        ({**MODELOPT, "quantized_layers": {"x": {}}}, "quantized_layers="),
        (
            {**MODELOPT, "config_groups": {"a": {"weights": {"num_bits": 8}}}},
            "num_bits=8: must be 4",
        ),
    ],
)
def test_values_that_change_results(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^model: quantization_config.* has {message}"):
        read(config)


def test_a_file_of_its_own(tmp_path: Path) -> None:
    """Older checkpoints of ModelOpt have one beside config.json."""
    shutil.copy(Path(BUNDLED_MODEL) / "config.json", tmp_path)
    own = {name: value for name, value in MODELOPT.items() if name != "quant_method"}
    settings = {"producer": {"name": "modelopt"}, "quantization": own}
    file = tmp_path / "hf_quant_config.json"
    file.write_text(json.dumps(settings))
    assert read_formats(Checkpoint.open(str(tmp_path)).hf_config).quantized
    file.write_text(json.dumps({**settings, "unheard_of": 1}))
    told = f"model='{tmp_path}': its hf_quant_config.json has unheard_of=1: nothing reads it here"
    with pytest.raises(ValueError, match=told):
        Checkpoint.open(str(tmp_path))


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

    def test_modules_that_gptq_lists(self) -> None:
        formats = read({**GPTQ, "modules_in_block_to_quantize": [["self_attn.k_proj"], ["mlp.up_proj"]]})
        names = ("self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj")
        assert [formats.of(f"model.layers.0.{name}") == PLAIN for name in names] == [False, True, False]

    def test_experts_that_gpt_oss_leaves_plain(self) -> None:
        formats = read({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.1.mlp", "*.layers.*2.mlp"]})
        assert [formats.of(f"model.layers.{layer}.mlp.experts") == PLAIN for layer in (0, 1, 10, 12)] == [
            False, True, False, True
        ]  # fmt: skip

    @pytest.mark.parametrize("blocks", ["model.layers.1,model.layers.2", ["model.layers.1", "model.layers.2"]])
    @pytest.mark.parametrize("name", ["block_name_to_quantize", "to_quant_block_names"])
    def test_blocks_of_auto_round(self, name: str, blocks: str | list[str]) -> None:
        formats = read({**ROUND, name: blocks, "extra_config": {"model.layers.0.mlp.up_proj": {"bits": 8}}})
        found = [formats.of(f"model.layers.{layer}.mlp.down_proj") == PLAIN for layer in (0, 1, 2, 10)]
        assert found == [True, False, False, True]
        assert formats.of("model.layers.0.mlp.up_proj") != PLAIN

    def test_settings_that_differ_where_matrices_are_one(self) -> None:
        formats = read({**ROUND, "extra_config": {"a": {"bits": 8}, "b": {"bits": 4}}})
        told = "a is in AutoRound and b in AutoRound: must be .* not int8 in groups of 32 .*and int4 in groups of 32"
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
