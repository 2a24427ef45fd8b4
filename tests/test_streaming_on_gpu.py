"""Layers that come from pinned host memory to a GPU: captured steps, memory as planned, and what may happen between."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.tuned import ALPHA, Tuned
from conftest import greedy
from test_gpu import in_use
from test_weights import weights_of

from nanoinfer import BUNDLED_MODEL, LLM, SamplingParams
from nanoinfer.benchmark.shapes import write_config
from nanoinfer.runner.streaming.stream import LayerStream

pytestmark = pytest.mark.gpu

ALL = 0.05  # GiB, more than the bundled model's layers have
OPTIONS: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 512, "max_num_seqs": 16, "kvcache_block_size": 16}
PROMPTS = [[30 + i] * (1 + 37 * i % 200) for i in range(24)]
PARAMS = [SamplingParams(temperature=[0, 0.8][i % 2], seed=i, max_tokens=40, ignore_eos=True) for i in range(24)]
LARGE = {"load_format": "dummy", "max_model_len": 512, "max_num_seqs": 16, "max_num_batched_tokens": 1024}
HUNG = """
import sys

from nanoinfer import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(sys.argv[1], load_format="dummy", max_model_len=512, max_num_seqs=16, num_kvcache_blocks=64,
              max_num_batched_tokens=1024, weight_offload_gib=10)
    print("ready", flush=True)
    while True:
        llm.generate([[5]] * 16, SamplingParams(max_tokens=200, ignore_eos=True), use_tqdm=False)
"""


def tokens(llm: LLM) -> list[list[int]]:
    llm.reset_prefix_cache()
    return [output["token_ids"] for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def stream_of(llm: LLM) -> LayerStream:
    stream = llm.engine.ranks.runner.holdings.stream
    assert stream is not None
    return stream


@pytest.fixture
def large(tmp_path: Path) -> str:
    """The folder of a model whose layers have 0.82 GiB."""
    write_config("0.6b", str(tmp_path))
    return str(tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enforce_eager": True},
        {"deterministic": True},
        {"quantization": "fp8"},
        {"quantization": "int4"},
        {"quantization": "mxfp4", "deterministic": True},
        {"speculation": "suffix", "deterministic": True},
        {"max_num_batched_tokens": 64, "num_kvcache_blocks": 100, "deterministic": True},
    ],
    ids=str,
)
def test_tokens_are_those_of_a_resident_model(options: dict[str, Any], make_llm: Callable[..., LLM]) -> None:
    """Both run the same kernels, but for a single row, which the bundled model computes in one launch."""
    streamed = make_llm(**OPTIONS | options, weight_offload_gib=ALL)
    assert stream_of(streamed).num_bytes > 0
    assert tokens(streamed) == tokens(make_llm(**OPTIONS | options))


def test_steps_verify_many_tokens(make_llm: Callable[..., LLM]) -> None:
    """Of 300 rows there are guesses, and none changes a token."""
    options = {**OPTIONS, "max_num_seqs": 300, "deterministic": True}
    streamed = make_llm(**options, weight_offload_gib=ALL, speculation="suffix")
    assert max(streamed.engine.ranks.runner.verify_sizes) >= (300, 1200)
    prompts = [[30 + i % 100] * (1 + i % 7) for i in range(300)]
    params = [SamplingParams(temperature=0.2, seed=i, max_tokens=48, ignore_eos=True) for i in range(300)]
    found = [
        [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]
        for llm in (streamed, make_llm(**options))
    ]
    assert found[0] == found[1]
    assert streamed.stats().num_accepted_tokens > 0


def test_graphs_and_eager_steps_follow_one_another(make_llm: Callable[..., LLM]) -> None:
    """Prompts come as others decode, of all sizes, and each step finds the layers that it begins with."""
    llm = make_llm(**OPTIONS, weight_offload_gib=ALL, deterministic=True)
    alone = [
        llm.generate([prompt], own, use_tqdm=False)[0].token_ids for prompt, own in zip(PROMPTS, PARAMS, strict=True)
    ]
    llm.reset_prefix_cache()
    found: dict[int, list[int]] = {i: [] for i in range(len(PROMPTS))}
    for new in llm.stream(PROMPTS, PARAMS):
        found[new.index] += new.token_ids
    assert list(found.values()) == alone


@pytest.mark.alone
def test_memory_is_as_planned(tmp_path: Path) -> None:
    """To 2% of a model of 8 GB, on the device and in host memory."""
    write_config("4b", str(tmp_path))
    large, options = str(tmp_path), {**LARGE, "num_kvcache_blocks": 64}
    with LLM(large, **options) as llm:
        llm.generate([[5]] * 16, greedy(4), use_tqdm=False)
        resident = llm.memory.used
        sizes = llm.engine.ranks.runner.holdings.layer_sizes
    del llm
    before, in_host = free_device(), anonymous_bytes()
    with LLM(large, **options, weight_offload_gib=10) as llm:
        stream = stream_of(llm)
        assert stream.num_bytes == sum(sizes.layers) == llm.memory.streamed
        assert stream.saved_bytes == sum(sizes.layers) - 2 * max(sizes.layers)
        assert resident - llm.memory.used == pytest.approx(stream.saved_bytes, abs=0.02 * sizes.total)
        assert anonymous_bytes() - in_host == pytest.approx(stream.num_bytes, abs=0.02 * sizes.total)
        assert 0 < llm.memory.copy_seconds < 1
        assert llm.memory.hiding_tokens > 16
        llm.generate([[5]] * 16, greedy(4), use_tqdm=False)
    del llm, stream
    assert free_device() >= before - (64 << 20)
    assert anonymous_bytes() - in_host < 0.02 * sizes.total


def free_device() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


@pytest.mark.alone
def test_a_model_that_does_not_fit(large: str) -> None:
    """An error names the least that makes it fit, which does, and "auto" finds what is needed."""
    with LLM(large, **LARGE, num_kvcache_blocks=16) as llm:  # what a process loads at first stays
        steps = llm.memory.steps + llm.memory.graphs
        small = {**LARGE, "kvcache_block_size": 16, "max_num_batched_tokens": 512}
    del llm
    free_device()
    room = in_use((steps + (700 << 20)) / torch.cuda.mem_get_info()[1])  # of weights, 1.16 GiB
    with pytest.raises(ValueError, match="set weight_offload_gib=") as raised:
        LLM(large, **small, gpu_memory_utilization=room)
    least = float(str(raised.value).partition("set weight_offload_gib=")[2].split()[0])
    for gib in (least, "auto"):
        with LLM(large, **small, gpu_memory_utilization=room, weight_offload_gib=gib) as llm:
            assert llm.memory.streamed >= (2**30 * least * 0.98 if gib == least else 1)
            limit = room * torch.cuda.mem_get_info()[1]
            llm.generate([[5]] * 16, greedy(4), use_tqdm=False)
            assert torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0] <= 1.02 * limit
        del llm
        free_device()


@pytest.mark.alone
def test_auto_leaves_a_model_that_fits_as_it_is(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(**OPTIONS, weight_offload_gib="auto")
    assert llm.engine.ranks.runner.holdings.stream is None
    assert llm.memory.streamed == 0


def test_updates_in_place(make_llm: Callable[..., LLM]) -> None:
    old, new = weights_of(BUNDLED_MODEL), {name: 1.1 * own for name, own in weights_of(BUNDLED_MODEL).items()}
    options = {**OPTIONS, "deterministic": True}
    llm, resident = make_llm(**options, weight_offload_gib=ALL), make_llm(**options)
    first = tokens(llm)
    assert first == tokens(resident)
    for source in (new, {name: tensor.cuda() for name, tensor in old.items()}, new):
        for one in (llm, resident):
            one.update_weights(source)
        assert tokens(llm) == tokens(resident)
    llm.load_weights(BUNDLED_MODEL)
    assert tokens(llm) == first


@pytest.mark.parametrize("level", [1, 2])
def test_sleep(level: int, make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(**OPTIONS, deterministic=True, weight_offload_gib=ALL)
    before = tokens(llm)
    for _ in range(2):
        llm.sleep(level)
        filler = torch.full((64 << 20,), 255, dtype=torch.uint8, device="cuda")
        llm.wake_up()
        if level == 2:
            llm.load_weights(BUNDLED_MODEL)
        assert tokens(llm) == before
        assert filler.eq(255).all()


def test_adapters(make_llm: Callable[..., LLM]) -> None:
    options, tuned = {**OPTIONS, "max_adapters": 1, "deterministic": True}, Tuned(BUNDLED_MODEL, seed=1)
    params = [greedy(12, adapter=[None, "red"][i % 2]) for i in range(8)]
    found = []
    for gib in (0, ALL):
        llm = make_llm(**options, weight_offload_gib=gib)
        llm.load_adapter("red", tuned.tensors, alpha=ALPHA)
        found.append([output.token_ids for output in llm.generate(PROMPTS[:8], params, use_tqdm=False)])
    assert found[0] == found[1]


@pytest.mark.alone
def test_killed_while_copying(large: str, tmp_path: Path) -> None:
    """The memory of the device comes back, and the next LLM runs."""
    before, script = free_device(), tmp_path / "hung.py"
    script.write_text(HUNG, "utf-8")
    with subprocess.Popen([sys.executable, script, large], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(1)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait(30) == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while free_device() < before - (64 << 20) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert free_device() >= before - (64 << 20)
    with LLM(large, **LARGE, num_kvcache_blocks=64, weight_offload_gib=10) as llm:
        assert len(llm.generate([[5]], greedy(8, ignore_eos=True), use_tqdm=False)[0].token_ids) == 8


@pytest.mark.multi_gpu
def test_two_ranks(make_llm: Callable[..., LLM]) -> None:
    options = {**OPTIONS, "tensor_parallel_size": 2, "deterministic": True}
    assert tokens(make_llm(**options, weight_offload_gib=ALL)) == tokens(make_llm(**options))


def test_weights_that_do_not_fit(make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("the device has no 0.06 GiB left")

    monkeypatch.setattr("nanoinfer.runner.memory.region.Region._map", full)
    with pytest.raises(ValueError, match=r"model: its weights take .*set weight_offload_gib=.* or more, or 'auto'"):
        make_llm(**OPTIONS)
