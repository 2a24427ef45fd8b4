"""Replicas of one machine have the layers that lie in host memory once, whatever happens to them."""

from __future__ import annotations

import fcntl
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import CASES, build, save
from conftest import alive, greedy, wait_until
from safetensors.torch import save_file
from test_weights import changed, weights_of

from nanoinfer import LLM
from nanoinfer.config import Config
from nanoinfer.process import host_memory
from nanoinfer.runner.memory import pinned_pages
from nanoinfer.runner.streaming.choice import choose_layers
from nanoinfer.runner.streaming.plan import LayerSizes
from nanoinfer.runner.streaming.shared_pages import GONE, READS, SharedPages

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = {"device": "cpu", "kvcache_block_size": 16, "max_model_len": 160, "weight_offload_gib": 1.0}
SIZES = [5000, 300, 5000]
DEVICE = torch.device("cpu")


@pytest.fixture
def file() -> Iterator[str]:
    """Make a file in memory, as the LLM's process does."""
    number = os.memfd_create("layers")
    yield f"/proc/{os.getpid()}/fd/{number}"
    os.close(number)


@pytest.fixture
def replicas(file: str) -> Callable[[], SharedPages]:
    """Return a function that makes the memory of another replica."""

    def make() -> SharedPages:
        pages = SharedPages(file, patience=0.2)
        pages.open(SIZES, DEVICE)
        return pages

    return make


def write(pages: SharedPages, number: int) -> bool:
    """Write a number everywhere, if this replica writes."""
    may = pages.may_write()
    if may:
        for tensor in pages.tensors:
            tensor.fill_(number)
    return may


def held(pages: SharedPages) -> set[int]:
    return {int(number) for tensor in pages.tensors for number in tensor.unique()}


class TestSharedPages:
    def test_what_one_writes_all_have(self, replicas: Callable[[], SharedPages]) -> None:
        first, second = replicas(), replicas()
        for number, is_first in ((7, True), (8, False), (9, False)):
            order = [first, second] if number % 2 else [second, first]
            for pages in order:
                pages.begin(is_first)
            assert [write(pages, number) for pages in order] == [True, False]
            assert [pages.end() for pages in order] == [None, None]
            assert held(first) == held(second) == {number}
        assert [len(tensor) for tensor in second.tensors] == SIZES

    def test_one_that_comes_later_reads_what_is_there(self, replicas: Callable[[], SharedPages]) -> None:
        first = replicas()
        first.begin(is_first=True)
        assert write(first, 7)
        assert first.end() is None
        late = replicas()
        late.begin(is_first=True)
        assert not write(late, 8)
        assert late.end() is None
        assert held(late) == {7}

    def test_nobody_writes_while_another_reads(self, replicas: Callable[[], SharedPages]) -> None:
        first, second = replicas(), replicas()
        for pages in (first, second):
            pages.begin(is_first=True)
        assert write(first, 7)
        assert (first.end(), second.end()) == (None, None)
        first.begin(is_first=False)
        later = threading.Timer(0.05, second.begin, [False])
        later.start()
        assert write(first, 8)  # it has waited
        assert not later.is_alive() or later.join() is None
        assert (first.end(), second.end()) == (None, None)
        first.begin(is_first=False)
        assert not write(first, 9)  # the other one never stops
        assert first.end() == "another replica still reads the layers after 0.2 s (worker_timeout)"
        assert held(second) == {8}

    @pytest.mark.parametrize("is_first", [True, False])
    def test_a_writer_that_does_not_come_to_the_end(self, is_first: bool, replicas: Callable[[], SharedPages]) -> None:
        first, second = replicas(), replicas()
        if not is_first:
            first.begin(is_first=True)
            second.begin(is_first=True)
            assert (first.end(), second.end()) == (None, None)
        first.begin(is_first)
        second.begin(is_first)
        assert write(first, 7)
        first.abandon()
        assert second.end() == GONE
        first.begin(is_first=False)
        second.begin(is_first=False)
        assert [write(first, 8), write(second, 8)] == [True, False]
        assert (first.end(), second.end()) == (None, None)
        assert held(second) == {8}

    def test_one_that_is_slow_to_begin_is_waited_for(self, replicas: Callable[[], SharedPages]) -> None:
        """Also if its memory has been opened again, as after sleep, or if it has left a change."""
        first, second = replicas(), replicas()
        for pages in (first, second):
            pages.begin(is_first=True)
        assert (first.end(), second.end()) == (None, None)
        second.close()
        second = replicas()
        first.begin(is_first=False)
        assert not write(first, 7)
        assert first.end() is not None
        for pages in (first, second):
            pages.begin(is_first=False)
        second.abandon()
        first.abandon()
        first.begin(is_first=False)
        assert not write(first, 7)

    def test_the_first_says_which_layers_are_streamed(self, file: str) -> None:
        assert SharedPages(file, 1).agree((0, 2, 300)) == (0, 2, 300)
        assert SharedPages(file, 1).agree((1,)) == (0, 2, 300)

    def test_that_none_are_streamed_counts_too(self, file: str) -> None:
        assert SharedPages(file, 1).agree(()) == ()
        assert SharedPages(file, 1).agree((1,)) == ()

    def test_the_host_needs_room_once(
        self, replicas: Callable[[], SharedPages], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(pinned_pages, "free_bytes", lambda: pinned_pages.SPARE_BYTES)
            with pytest.raises(MemoryError, match=r"1.0 GiB are free, of which 1.0 GiB stay so"):
                replicas()
        replicas()
        monkeypatch.setattr(pinned_pages, "free_bytes", lambda: 0)
        replicas()

    def test_a_process_that_is_killed_holds_nothing(self, replicas: Callable[[], SharedPages], file: str) -> None:
        """It dies as it writes; locks and memory go."""
        second = replicas()
        begun, told = os.pipe()
        child = os.fork()
        if child == 0:
            first = SharedPages(file, patience=1)
            first.open(SIZES, DEVICE)
            first.begin(is_first=True)
            os.write(told, b"." if write(first, 7) else b"x")
            signal.pause()
        assert os.read(begun, 1) == b"."
        second.begin(is_first=True)
        assert not second.may_write()
        os.kill(child, signal.SIGKILL)
        assert second.end() == GONE
        os.waitpid(child, 0)
        os.close(begun)
        os.close(told)
        second.begin(is_first=False)
        assert write(second, 8)
        assert second.end() is None


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU stream layers, from memory to memory."""
    monkeypatch.setattr(Config, "_check_offload", lambda config: None)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A model, and one with other weights. Its matrices have few rows: the CPU keeps no copies in another order."""
    old, new = tmp_path_factory.mktemp("old"), tmp_path_factory.mktemp("new")
    case = CASES["qwen3"]
    few = {"intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    case = replace(case, settings={**case.settings, **few})
    save(changed(build(case, old)), new)
    return str(old), str(new)


def shared_files() -> list[str]:
    """The files for layers that this process holds open."""
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return [os.readlink(link) for link in links if os.path.islink(link) and "nanoinfer-layers" in os.readlink(link)]


def mapped(pid: int) -> set[str]:
    """The files for layers that a process has mapped, by their numbers."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "nanoinfer-layers" in line}


def tokens(llm: LLM) -> list[list[int]]:
    """The tokens of many prompts, so that each replica gets some."""
    prompts = [[*range(number, 20 + 2 * number)] for number in range(10, 26)]
    return [output.token_ids for output in llm.generate(prompts, greedy(6, ignore_eos=True), use_tqdm=False)]


@pytest.mark.usefixtures("on_cpu")
class TestReplicas:
    @pytest.mark.parametrize("options", [OPTIONS, {**OPTIONS, "quantization": "int4"}], ids=["plain", "int4"])
    def test_new_weights(self, options: dict[str, Any], folders: tuple[str, str], make_llm: Callable[..., LLM]) -> None:
        old, new = folders
        alone = make_llm(old, **options)
        llm = make_llm(old, **options, data_parallel_size=2)
        own = {pid: mapped(pid) for pid in llm.engine.pids.values()}
        assert len(own) == 2
        assert all(own.values())
        assert len(set.union(*own.values())) == 1  # one file, which both have
        first = tokens(alone)
        assert tokens(llm) == first
        alone.load_weights(new)
        llm.load_weights(new)
        second = tokens(alone)
        assert tokens(llm) == second != first
        tensors = list(weights_of(old).items())
        random.Random(0).shuffle(tensors)
        half = len(tensors) // 2
        llm.update_weights(dict(tensors[:half]), partial=True)
        llm.update_weights(dict(tensors[half:]), partial=True)
        assert tokens(llm) == first
        llm.close()
        assert shared_files() == []

    @pytest.mark.whole  # five processes
    def test_ranks_have_shares_of_their_own(self, folders: tuple[str, str], make_llm: Callable[..., LLM]) -> None:
        old, new = folders
        options = {**OPTIONS, "quantization": "int4", "tensor_parallel_size": 2}
        llm = make_llm(old, **options, data_parallel_size=2)
        assert len(shared_files()) == 2
        alone = make_llm(old, **{**options, "weight_offload_gib": 0})
        first = tokens(alone)
        assert tokens(llm) == first
        for each in (llm, alone):
            each.update_weights(weights_of(new))
        assert tokens(llm) == tokens(alone) != first

    @pytest.mark.parametrize("level", [1, 2])
    def test_sleep(self, level: int, folders: tuple[str, str], make_llm: Callable[..., LLM]) -> None:
        old, _ = folders
        llm = make_llm(old, **OPTIONS, data_parallel_size=2)
        before = tokens(llm)
        llm.sleep(level)
        llm.wake_up()
        if level == 2:
            llm.load_weights(old)
        assert tokens(llm) == before

    def test_a_replica_that_is_killed_finds_the_layers_when_it_starts_again(
        self, folders: tuple[str, str], make_llm: Callable[..., LLM]
    ) -> None:
        old, _ = folders
        llm = make_llm(old, **OPTIONS, data_parallel_size=2, restart_replicas=True)
        before = tokens(llm)
        for index in (0, 1):
            pid = llm.engine.pids[index]
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda pid=pid: not alive(pid))
            assert tokens(llm) == before
            while len(llm.engine.ready) < 2:
                llm.engine.wait_for_event()
                llm.engine.take_events()
            assert llm.engine.pids[index] != pid
            assert tokens(llm) == before

    def test_a_writer_that_is_gone_leaves_a_mixture(
        self, folders: tuple[str, str], make_llm: Callable[..., LLM]
    ) -> None:
        """The others say so, compute nothing, and take whole weights."""
        old, new = folders
        llm = make_llm(old, **OPTIONS, data_parallel_size=2)
        first = tokens(llm)
        writer = SharedPages(llm.engine._config.layer_files[0], patience=1)  # this process, which is no replica
        writer.begin(is_first=False)
        threading.Timer(0.2, writer.abandon).start()
        with pytest.raises(ValueError, match=re.escape(GONE)):
            llm.load_weights(new)
        writer.close()
        with pytest.raises(RuntimeError, match="all tensors"):
            tokens(llm)
        llm.load_weights(new)
        assert tokens(llm) != first
        llm.load_weights(old)
        assert tokens(llm) == first

    @pytest.mark.parametrize("index", [0, 1, 2])
    def test_a_replica_is_killed_while_the_writer_waits(
        self, index: int, folders: tuple[str, str], make_llm: Callable[..., LLM]
    ) -> None:
        """If it was the writer, the others say that the weights are a mixture; if not, nobody cares."""
        old, new = folders
        llm = make_llm(old, **OPTIONS, data_parallel_size=3)
        first = tokens(llm)
        reader = SharedPages(llm.engine._config.layer_files[0], patience=1)
        reader._lock(READS, fcntl.F_RDLCK)

        def kill() -> None:
            os.kill(llm.engine.pids[index], signal.SIGKILL)
            reader.close()

        threading.Timer(0.2, kill).start()
        with suppress(ValueError):
            llm.load_weights(new)
        llm.load_weights(new)
        assert len(llm.engine.ready) == 2
        second = tokens(llm)
        assert second != first
        llm.load_weights(old)
        assert tokens(llm) == first

    def test_an_error_is_that_of_the_replica_that_reads(
        self, folders: tuple[str, str], make_llm: Callable[..., LLM], tmp_path: Path
    ) -> None:
        old, _ = folders
        name = "model.layers.2.mlp.down_proj.weight"
        broken = weights_of(old)
        broken[name][1, 2] = torch.nan
        shutil.copytree(old, tmp_path / "broken")
        save_file(broken, tmp_path / "broken" / "model.safetensors")
        with pytest.raises(ValueError, match=f"{re.escape(name)} has numbers that are NaN"):
            make_llm(str(tmp_path / "broken"), **OPTIONS, data_parallel_size=2)
        assert shared_files() == []
        llm = make_llm(old, **OPTIONS, data_parallel_size=2)
        before = tokens(llm)
        with pytest.raises(ValueError, match=f"{re.escape(name)} has numbers that are NaN"):
            llm.load_weights(str(tmp_path / "broken"))
        llm.load_weights(old)
        assert tokens(llm) == before

    def test_all_go_with_the_process_that_made_them(self, folders: tuple[str, str]) -> None:
        """It is killed as requests run: no process and no memory stays."""
        script = f"""
import sys
import time
from nanoinfer import LLM
from nanoinfer.config import Config

if __name__ == "__main__":
    Config._check_offload = lambda config: None
    llm = LLM({folders[0]!r}, **{OPTIONS!r}, data_parallel_size=2, use_tqdm=False)
    print(*llm.engine.pids.values(), flush=True)
    time.sleep(60)
"""
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            pids = [int(pid) for pid in process.stdout.readline().split()]
            assert len(set.union(*map(mapped, pids))) == 1
            process.kill()
        wait_until(lambda: not any(map(alive, pids)))


@pytest.fixture
def beside(file: str, monkeypatch: pytest.MonkeyPatch, on_cpu: None) -> None:
    """Let the LLMs of this process share their layers, as if each were a replica in a process of its own."""
    monkeypatch.setattr(Config, "layer_files", (file,))
    monkeypatch.setattr("nanoinfer.weights.formats.plain.matrix.can_pack", lambda weight: False)
    monkeypatch.setattr("nanoinfer.weights.formats.groups.store.may_keep", lambda shape, dtype: False)


ON_GPU = {"max_model_len": 160, "weight_offload_gib": 1.0, "gpu_memory_utilization": 0.2}


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("options", [OPTIONS, pytest.param(ON_GPU, marks=pytest.mark.gpu)], ids=["cpu", "gpu"])
@pytest.mark.parametrize(
    ("name", "quantization"),
    [("qwen3", None), ("qwen3", "fp8"), ("qwen3moe", "int4"), ("gptoss", None), ("deepseek-v3", None)],
)
def test_families_beside_each_other(
    name: str,
    quantization: str | None,
    options: dict[str, Any],
    make_llm: Callable[..., LLM],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    save(changed(build(CASES[name], old)), new)
    own = {"kvcache_block_size": CASES[name].small["kvcache_block_size"]} if options is OPTIONS else {}
    options = {**options, **own, "quantization": quantization}
    llms = [make_llm(str(old), **options) for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(Config, "layer_files", ())
        alone = make_llm(str(old), **options)
    first = tokens(alone)
    assert [tokens(llm) for llm in llms] == [first] * 2
    alone.load_weights(str(new))
    second = tokens(alone)
    for folder, wanted in ((new, second), (old, first)):
        with ThreadPoolExecutor() as threads:
            assert len([*threads.map(lambda llm, folder=folder: llm.load_weights(str(folder)), llms)]) == 2
        assert [tokens(llm) for llm in llms] == [wanted] * 2
    assert first != second


def test_the_host_needs_memory_for_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, asked = LayerSizes((1 << 30,) * 8, 0), {"weight_offload_gib": 8.0, "gpu_memory_utilization": 0.9}
    config = SimpleNamespace(**asked, tensor_parallel_size=1, data_parallel_size=4, is_on_ray=False)
    config.description = SimpleNamespace(formats=SimpleNamespace(quantized=True))
    monkeypatch.setattr(host_memory, "total_bytes", lambda: 9 << 30)
    config.layer_files = ("a",)
    assert len(choose_layers(config, sizes, (None, None), DEVICE).layers) == 8
    config.layer_files = ()
    with pytest.raises(ValueError, match="32 GiB of layers would lie in host memory, which has 9"):
        choose_layers(config, sizes, (None, None), DEVICE)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("quantization", [None, "int4", "fp8"])
def test_replicas_on_gpus(quantization: str | None, folders: tuple[str, str], make_llm: Callable[..., LLM]) -> None:
    """Pages that another process has filled are pinned, copied by graphs, and changed in place."""
    old, new = folders
    options = {"quantization": quantization, "max_model_len": 160, "gpu_memory_utilization": 0.2}
    llm = make_llm(old, **options, weight_offload_gib=1.0, data_parallel_size=2)
    assert tokens(llm) == tokens(make_llm(old, **options))
    llm.load_weights(new)
    assert tokens(llm) == tokens(make_llm(new, **options))
