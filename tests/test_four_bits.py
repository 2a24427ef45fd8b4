"""Models in four and eight bits: checkpoints of every published layout, and others that are rounded as they load."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import CASES, build
from cases.layouts import PUBLISHED, Published, Writer
from conftest import Oracle, greedy, whole_only
from safetensors.torch import load_file, save_file
from test_fp8 import of_tokens, recited  # noqa: F401 - a fixture

from nanoinfer import LLM

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = {"device": "cpu", "kvcache_block_size": 16, "max_model_len": 160}
PROMPTS = [[7], list(range(20, 60)), [5, 6] * 30]
SIZES = {"hidden_size": 64, "intermediate_size": 96}  # of which two ranks have 48 inputs: they cut groups of 32
Write = Callable[..., tuple[str, str]]
MakeLLM = Callable[..., LLM]


def tokens_of(llm: LLM) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, greedy(8, ignore_eos=True), use_tqdm=False)]


def writer_of(published: Published, name: str) -> Writer | None:
    """Return what writes a tensor in the format; None: it stays as it is."""
    module = name.removesuffix(".weight")
    if not name.endswith("_proj.weight"):
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


FIRST = ["int4 groups", "gptq act order with zeros", "awq", "modelopt", "mxfp4"]
CASES_OF_ALL = [*FIRST, *whole_only([name for name in PUBLISHED if name not in FIRST])]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", CASES_OF_ALL)
@pytest.mark.parametrize("family", ["qwen3", *whole_only(["llama biases, llama3 rope", "phi3"])])
def test_a_checkpoint_gives_the_tokens_of_what_it_stands_for(
    family: str, name: str, ranks: int, write: Write, make_llm: MakeLLM
) -> None:
    folder, dense = write(family, PUBLISHED[name])
    oracle = Oracle(dense)
    llm = make_llm(folder, **OPTIONS, tensor_parallel_size=ranks)
    assert tokens_of(llm) == [oracle.greedy(prompt, 8, ignore_eos=True) for prompt in PROMPTS]


EXPERTS = {"moe_intermediate_size": 48}


@pytest.mark.parametrize("ranks", [1, *whole_only([2])])
@pytest.mark.parametrize(
    "name", ["int4 with zeros", "gptq", *whole_only(["gptq act order", "awq", "nvfp4", "int8 groups"])]
)
def test_experts(name: str, ranks: int, write: Write, make_llm: MakeLLM) -> None:
    folder, dense = write("qwen3moe", PUBLISHED[name], **EXPERTS)
    llm = make_llm(folder, **OPTIONS, tensor_parallel_size=ranks)
    assert tokens_of(llm) == tokens_of(make_llm(dense, **OPTIONS))
