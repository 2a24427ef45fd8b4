"""Layers that lie in host memory: the same tokens as if they stayed on the device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, build
from conftest import greedy
from test_weights import changed

from nanoinfer import LLM
from nanoinfer.config import Config
from nanoinfer.runner.streaming.stream import LayerStream

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = {"device": "cpu", "kvcache_block_size": 16, "max_model_len": 160}
ALL = 1.0  # GiB, more than a small model has
PROMPTS = [[7], list(range(20, 60)), [5, 6] * 20]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU stream layers, from memory to memory, and keep no copies of weights in other forms."""
    monkeypatch.setattr(Config, "_check_offload", lambda config: None)
    monkeypatch.setattr("nanoinfer.weights.formats.plain.matrix.can_pack", lambda weight: False)
    monkeypatch.setattr("nanoinfer.weights.formats.groups.store.may_keep", lambda shape, dtype: False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    @functools.cache
    def make(name: str) -> str:
        made = tmp_path_factory.mktemp("model")
        build(CASES[name], made)
        return str(made)

    return make


def stream_of(llm: LLM) -> LayerStream:
    stream = llm.engine.ranks.runner.holdings.stream
    assert stream is not None
    return stream


def results(llm: LLM) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(PROMPTS, greedy(), use_tqdm=False)]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", ["qwen3", "qwen3moe", "gemma3", "glm4moe", "qwen3.5"])
def test_tokens_are_those_of_a_resident_model(
    name: str, folder: Callable[[str], str], make_llm: Callable[..., LLM]
) -> None:
    options = {**OPTIONS, "kvcache_block_size": CASES[name].small["kvcache_block_size"]}
    streamed = make_llm(folder(name), **options, weight_offload_gib=ALL)
    assert stream_of(streamed).num_bytes > 0
    assert results(streamed) == results(make_llm(folder(name), **options))
