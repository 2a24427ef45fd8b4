"""Other processes start before the checkpoint is read, and leave nothing behind if the LLM cannot be made."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import alive, greedy, wait_until

from nanoinfer import BUNDLED_MODEL, LLM, WorkerError
from nanoinfer.checkpoint import Checkpoint

Processes = list[Any]
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


@pytest.fixture(params=KINDS)
def options(request: pytest.FixtureRequest) -> dict[str, object]:
    return {"device": "cpu", "num_kvcache_blocks": 8, **KINDS[request.param]}


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    """Those that are started from now on."""
    started: Processes = []
    start = multiprocessing.context.SpawnProcess.start
    monkeypatch.setattr(
        multiprocessing.context.SpawnProcess, "start", lambda process: (started.append(process), start(process))[1]
    )
    return started


def meanwhile(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Let something happen just before the checkpoint is read."""
    read = Checkpoint.open
    monkeypatch.setattr(Checkpoint, "open", lambda *how: (act(), read(*how))[1])


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def test_they_import_while_the_checkpoint_is_read(
    options: dict[str, object], processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    meanwhile(monkeypatch, lambda: seen.append(sum(process.is_alive() for process in processes)))
    with LLM(BUNDLED_MODEL, **options) as llm:
        assert seen == [len(processes)] != [0]
        assert llm.generate(["To be"], greedy(4), use_tqdm=False)[0].token_ids
    assert not any(process.is_alive() for process in processes)


def test_options_that_cannot_work_start_none(options: dict[str, object], processes: Processes) -> None:
    with pytest.raises(ValueError, match="max_num_seqs=0"):
        LLM(BUNDLED_MODEL, **options, max_num_seqs=0)
    assert processes == []


@pytest.mark.parametrize(("model", "more"), [("/nowhere", {}), (BUNDLED_MODEL, {"kv_cache_dtype": "fp4"})])
def test_a_fault_that_is_found_later_ends_them(
    model: str, more: dict[str, object], options: dict[str, object], processes: Processes
) -> None:
    before = shared_memory()
    with pytest.raises(ValueError, match=r"no such folder|kv_cache_dtype='fp4'"):
        LLM(model, **options, **more)
    assert processes
    assert not any(process.is_alive() for process in processes)
    assert shared_memory() == before


def test_an_interrupt_ends_them(
    options: dict[str, object], processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = shared_memory()
    meanwhile(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        LLM(BUNDLED_MODEL, **options)
    assert processes
    assert not any(process.is_alive() for process in processes)
    assert shared_memory() == before


def test_one_that_dies_meanwhile_is_named(
    options: dict[str, object], processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = shared_memory()
    meanwhile(monkeypatch, lambda: (processes[0].kill(), processes[0].join()))
    with pytest.raises(WorkerError, match=r"(replica 0|rank 1) died: it ended with exit code -9"):
        LLM(BUNDLED_MODEL, **options)
    assert not any(process.is_alive() for process in processes)
    assert shared_memory() == before


@pytest.mark.parametrize("option", [option for kind in KINDS.values() for option in kind])
def test_they_end_when_their_parent_is_killed(option: str, tmp_path: Path) -> None:
    before = shared_memory()
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    with subprocess.Popen([sys.executable, script, option], stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert all(map(alive, pids))
        parent.kill()
    assert pids
    assert wait_until(lambda: not any(map(alive, pids)), 20)
    assert wait_until(lambda: shared_memory() <= before, 20)
