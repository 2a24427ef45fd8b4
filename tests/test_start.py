"""Other processes and the GPU start before the checkpoint is read; nothing is left behind if the LLM cannot be made."""

from __future__ import annotations

import functools
import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import HAS_CUDA, alive, greedy, of_each_kind, wait_until
from triton.runtime import cache

from nanoinfer import BUNDLED_MODEL, LLM, WorkerError, llm
from nanoinfer.checkpoint import Checkpoint
from nanoinfer.config import Config
from nanoinfer.engine.ranks.workers import Workers
from nanoinfer.process import first_launch
from nanoinfer.process.first_launch import OWN_GPU, VISIBLE, make_context, read_triton, started_for
from nanoinfer.replicas import start
from nanoinfer.replicas.replicas import Replicas
from nanoinfer.replicas.start import Start
from nanoinfer.requests.text.tokenizer import load_tokenizer
from nanoinfer.runner import rank

KINDS = {"replicas": {"data_parallel_size": 2}, "ranks": {"tensor_parallel_size": 2}}
KILLED = """
import sys, time
import multiprocessing.context
from nanoinfer import BUNDLED_MODEL, LLM
from nanoinfer.checkpoint import Checkpoint

if __name__ == "__main__":
    processes, start = [], multiprocessing.context.SpawnProcess.start
    multiprocessing.context.SpawnProcess.start = lambda process: (processes.append(process), start(process))

    def hold(*how):
        print(*(process.pid for process in processes), flush=True)
        time.sleep(60)

    Checkpoint.open = hold
    LLM(BUNDLED_MODEL, device="cpu", **{sys.argv[1]: 2})
"""
SILENT = """
import sys
from nanoinfer import BUNDLED_MODEL, LLM, SamplingParams

if __name__ == "__main__":
    with LLM(BUNDLED_MODEL, device="cpu", num_kvcache_blocks=8, **{sys.argv[1]: 2}) as llm:
        llm.generate(["To be"], SamplingParams(max_tokens=4), use_tqdm=False)
    print("done")
"""
IMPORTS = """
import gc, json, os, sys, threading

class Noting(threading.Thread):
    def __init__(self, target, **how):
        if "torch" not in sys.modules:
            begun.append(target.__name__)
        super().__init__(target=target, **how)

begun = []
threading.Thread = Noting
gc.disable()
import nanoinfer.runner.worker
found = {"begun": begun, "has own": "NANOINFER_OWN_GPU" in os.environ, "collects": gc.isenabled()}
found["has transformers"] = "transformers" in sys.modules
from triton import knobs
found["compiles once"] = knobs.cache.manager_class is not None
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def imported() -> Callable[[str], dict[str, Any]]:
    """Return a function that tells what a process finds that starts as a rank and imports what ranks do."""

    @functools.cache
    def start(process: str) -> dict[str, Any]:
        gpu = {OWN_GPU: "0"} if process == "for a GPU" else {}
        done = subprocess.run(
            [sys.executable, "-c", IMPORTS], env=os.environ | gpu, check=True, stdout=subprocess.PIPE, text=True
        )
        return dict(json.loads(done.stdout))

    return start


@pytest.fixture(params=KINDS)
def options(request: pytest.FixtureRequest) -> dict[str, object]:
    return {"device": "cpu", "num_kvcache_blocks": 8, **KINDS[request.param]}


class Others:
    """The processes that are started from now on, and the shared memory that there is when the checkpoint is read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.processes: list[Any] = []
        self.act: Callable[[], object] = lambda: None  # just before the checkpoint is read
        self.running = 0  # then
        self.segments: set[Path] = set()
        start, read, before = BaseProcess.start, Checkpoint.open, shared_memory("self")

        def note_and_read(*where: str | None) -> Checkpoint:
            self.running = sum(process.is_alive() for process in self.processes)
            self.segments = shared_memory("self") - before
            self.act()
            return read(*where)

        monkeypatch.setattr(BaseProcess, "start", lambda process: (self.processes.append(process), start(process))[1])
        monkeypatch.setattr(Checkpoint, "open", note_and_read)

    def check_gone(self) -> None:
        assert self.processes
        assert not any(process.is_alive() for process in self.processes)
        assert not any(map(Path.exists, self.segments))


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> Others:
    return Others(monkeypatch)


def shared_memory(pid: int | str) -> set[Path]:
    """The segments that a process has mapped: other tests may make their own meanwhile."""
    return set(map(Path, re.findall(r"/dev/shm/\S+", Path(f"/proc/{pid}/maps").read_text())))


def test_they_import_while_the_checkpoint_is_read(options: dict[str, object], others: Others) -> None:
    with LLM(BUNDLED_MODEL, **options) as llm:
        assert others.running == len(others.processes) > 0
        assert bool(others.segments) == ("tensor_parallel_size" in options)  # replicas have pipes alone
        assert llm.generate(["To be"], greedy(4), use_tqdm=False)[0].token_ids
    others.check_gone()


@pytest.mark.parametrize(("model", "more"), [("/nowhere", {}), (BUNDLED_MODEL, {"max_num_seqs": 0})])
def test_what_cannot_work_from_the_beginning_starts_none(
    model: str, more: dict[str, object], options: dict[str, object], others: Others
) -> None:
    with pytest.raises(ValueError, match=r"no such folder|max_num_seqs=0"):
        LLM(model, **options, **more)
    assert others.processes == []


def test_a_fault_that_is_found_later_ends_them(options: dict[str, object], others: Others) -> None:
    with pytest.raises(ValueError, match="attention_backend='none'"):
        LLM(BUNDLED_MODEL, **options, attention_backend="none")
    others.check_gone()


def test_replicas_load_while_this_process_reads_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    begin = Replicas.begin
    monkeypatch.setattr(Replicas, "begin", lambda *how: (order.append("begin"), begin(*how)))
    monkeypatch.setattr(llm, "load_tokenizer", lambda config: (order.append("read"), load_tokenizer(config))[1])
    LLM(BUNDLED_MODEL, device="cpu", num_kvcache_blocks=8, data_parallel_size=2).close()
    assert order == ["begin", "read"]


def test_a_tokenizer_that_cannot_be_read_ends_them(options: dict[str, object], others: Others, tmp_path: Path) -> None:
    model = shutil.copytree(BUNDLED_MODEL, tmp_path / "model")
    (model / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="cannot load its tokenizer"):
        LLM(str(model), **options)
    others.check_gone()


def test_an_interrupt_ends_them(options: dict[str, object], others: Others) -> None:
    others.act = lambda: os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        LLM(BUNDLED_MODEL, **options)
    others.check_gone()


def test_an_interrupt_when_all_is_made_ends_them(
    options: dict[str, object], others: Others, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = Start.finish

    def finish_and_interrupt(*how: object) -> object:
        made = finish(*how)
        os.kill(os.getpid(), signal.SIGINT)
        return made

    monkeypatch.setattr(Start, "finish", finish_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        LLM(BUNDLED_MODEL, **options)
    others.check_gone()


def test_one_that_dies_meanwhile_is_named(options: dict[str, object], others: Others) -> None:
    others.act = lambda: (others.processes[0].kill(), others.processes[0].join())
    with pytest.raises(WorkerError, match=r"(replica 0|rank 1) died: it ended with exit code -9"):
        LLM(BUNDLED_MODEL, **options)
    others.check_gone()


@pytest.mark.parametrize("option", of_each_kind([option for kind in KINDS.values() for option in kind], 0))
def test_they_end_when_their_parent_is_killed(option: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    with subprocess.Popen([sys.executable, script, option], stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        segments = shared_memory(parent.pid)
        assert pids
        assert all(map(alive, pids))
        parent.kill()
    assert wait_until(lambda: not any(map(alive, pids)), 20)
    assert wait_until(lambda: not any(map(Path.exists, segments)), 20)


@pytest.mark.whole
@pytest.mark.parametrize("option", [option for kind in KINDS.values() for option in kind])
def test_they_end_without_a_word(option: str, tmp_path: Path) -> None:
    """Some versions of Triton tell of what is left when a process ends."""
    script = tmp_path / "script.py"
    script.write_text(SILENT)
    done = subprocess.run([sys.executable, script, option], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == "done\n"


@pytest.mark.usefixtures("spawned")
class TestGPU:
    """What the first launch waits for, threads do early."""

    @pytest.fixture(autouse=True)
    def fresh(self) -> Iterator[None]:
        """A process has one thread for Triton: forget it."""
        read_triton.cache_clear()
        yield
        read_triton.cache_clear()

    @pytest.fixture
    def four_gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As far as Config can see."""
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)

    def test_triton_is_read_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        reads: list[threading.Thread] = []
        monkeypatch.setattr(cache, "triton_key", lambda: reads.append(threading.current_thread()))
        threads = [read_triton() for _ in range(3)]
        for thread in threads:
            thread.join()
        assert reads == [threads[0]]

    @pytest.mark.filterwarnings("error")  # of a thread that has raised
    def test_a_triton_without_that_function_or_that_driver_is_left_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(cache, "triton_key")
        monkeypatch.delattr("triton.backends.nvidia.driver.CudaUtils")
        read_triton().join()

    @pytest.mark.filterwarnings("error")
    def test_tritons_driver_is_built_and_told_of_only_at_a_launch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        builds: list[threading.Thread] = []

        def fail() -> None:
            builds.append(threading.current_thread())
            raise RuntimeError("Failed to find C compiler")

        monkeypatch.setattr(cache, "triton_key", lambda: None)
        monkeypatch.setattr("triton.backends.nvidia.driver.CudaUtils", fail)
        thread = read_triton()
        thread.join()
        assert builds == [thread]

    @pytest.mark.parametrize("before", [None, "3,5"])
    @pytest.mark.parametrize("visible", [None, "7,8"])
    def test_a_process_is_started_for_one_gpu(
        self, before: str | None, visible: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv(VISIBLE, raising=False)
        if before is not None:
            monkeypatch.setenv(VISIBLE, before)
        with started_for(torch.device("cuda", 1), visible):
            assert (os.environ.get(VISIBLE), os.environ[OWN_GPU]) == (visible or before, "1")
        with started_for(torch.device("cpu")):
            assert (os.environ.get(VISIBLE), os.environ.get(OWN_GPU)) == (before, None)
        with suppress(RuntimeError), started_for(torch.device("cuda", 1), visible):
            stop()
        assert (os.environ.get(VISIBLE), os.environ.get(OWN_GPU)) == (before, None)

    def test_threads_start_processes_one_after_the_other(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each finds its own GPUs, and in the end the environment is what it was."""
        monkeypatch.setenv(VISIBLE, "2,3")
        together = threading.Barrier(2)

        def start(visible: str) -> None:
            together.wait(10)
            for _ in range(300):
                with started_for(torch.device("cuda", 0), visible):
                    assert os.environ[VISIBLE] == visible

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(start, ["2", "3"]))
        assert (os.environ[VISIBLE], os.environ.get(OWN_GPU)) == ("2,3", None)

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({"data_parallel_size": 2}, [("0", "0")]),
            ({"data_parallel_size": 2, "tensor_parallel_size": 2}, [("0,1", "0")]),
            ({"tensor_parallel_size": 2}, [(None, "1")]),
        ],
    )
    def test_ranks_and_replicas_are_started_for_theirs(
        self,
        options: dict[str, object],
        expected: list[tuple[str | None, str]],
        four_gpus: None,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        seen: list[tuple[str | None, str]] = []
        monkeypatch.delenv(VISIBLE, raising=False)
        monkeypatch.setattr(first_launch, "prepare", lambda _: None)
        monkeypatch.setattr(
            BaseProcess, "start", lambda _: (seen.append((os.environ.get(VISIBLE), os.environ[OWN_GPU])), stop())
        )
        with pytest.raises(RuntimeError, match="stop"):
            Config(BUNDLED_MODEL, device="cuda", **options, when_checked=Start().spawn)
        assert seen == expected

    @pytest.mark.parametrize(("process", "expected"), [("for a GPU", ["make", "read"]), ("for none", [])])
    def test_such_a_process_begins_while_it_imports_torch(
        self, process: str, expected: list[str], imported: Callable[[str], dict[str, Any]]
    ) -> None:
        found = imported(process)
        assert found["begun"] == expected
        assert not found["has own"]  # or processes that it starts would have it
        assert found["compiles once"] == (process == "for a GPU")

    @pytest.mark.skipif(HAS_CUDA, reason="there is a driver")
    @pytest.mark.filterwarnings("error")
    def test_without_a_driver_pytorch_tells_of_the_error(self) -> None:
        make_context(0).join()

    @pytest.mark.parametrize("options", [{}, *KINDS.values()])
    def test_it_begins_where_this_process_computes(
        self, options: dict[str, object], four_gpus: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begun: list[object] = []
        monkeypatch.setattr(first_launch, "prepare", begun.append)
        monkeypatch.setattr(start, "compile_once", lambda: begun.append("compile once"))
        monkeypatch.setattr(Replicas, "__init__", lambda *_: None)
        monkeypatch.setattr(Workers, "__init__", lambda *_: None)
        with suppress(RuntimeError):
            Config(BUNDLED_MODEL, device="cuda", **options, when_checked=lambda config: (Start().spawn(config), stop()))
        shares = ["compile once"] if "tensor_parallel_size" in options else []
        assert begun == ([] if "data_parallel_size" in options else [0, *shares])

    def test_on_the_cpu_it_is_not_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rank, "read_triton", stop)
        monkeypatch.setattr(first_launch, "prepare", stop)
        LLM(BUNDLED_MODEL, device="cpu", num_kvcache_blocks=8).close()

    @pytest.mark.gpu
    def test_pytorch_uses_the_context(self) -> None:
        """And the LLM's kernels find Triton read."""
        script = """
from nanoinfer import BUNDLED_MODEL, LLM
from nanoinfer.process.first_launch import make_context
import torch
from triton.runtime.cache import triton_key

make_context(0).join()
assert not torch.cuda.is_initialized()
with LLM(BUNDLED_MODEL, device="cuda", num_kvcache_blocks=200):
    pass
assert triton_key.cache_info().misses == 1
"""
        subprocess.run([sys.executable, "-c", script], check=True)


def stop() -> None:
    raise RuntimeError("stop")


def test_imports_leave_the_collector_as_it_was(imported: Callable[[str], dict[str, Any]]) -> None:
    assert gc.isenabled()  # this process had it enabled when it imported nanoinfer
    assert not imported("for none")["collects"]


def test_a_rank_imports_no_transformers(imported: Callable[[str], dict[str, Any]]) -> None:
    """Each process that starts would take a second longer, and far longer beside all that transformers looks for."""
    assert not imported("for a GPU")["has transformers"]
