"""Processes that start together compile a kernel once; whatever becomes of the one that does, the others go on."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from triton import knobs
from triton.runtime.cache import FileCacheManager

from nanoinfer.process import compile_once
from nanoinfer.process.compile_once import OneCompiles

COMPILE = """
import json
import sys

import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nanoinfer.process.compile_once import compile_once


@triton.jit
def add_one(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)


compile_once()
found = []
knobs.compilation.listener = lambda cache_hit, **_: found.append(cache_hit)
print("ready", flush=True)
sys.stdin.readline()
types = {"x": "*fp32", "y": "*fp32", "n": "i32", "BLOCK": "constexpr"}
for block in (64, 128, 256):
    source = ASTSource(fn=add_one, signature=types, constexprs={(3,): block})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))
print(json.dumps(found))
"""
FORK = multiprocessing.get_context("fork")  # a new interpreter would take seconds to import torch


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    return tmp_path


@pytest.fixture
def manager_class() -> Iterator[Any]:
    """What the process uses, which is as before in the end."""
    before = knobs.cache.manager_class
    yield knobs.cache
    knobs.cache.manager_class = before


def start(script: str, folder: Path) -> subprocess.Popen[str]:
    file = folder / "script.py"  # Triton reads the source of kernels
    if not file.exists():  # a process that was started before may be reading it
        file.write_text(script)
    return subprocess.Popen([sys.executable, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.whole
def test_one_of_several_processes_compiles_each_kernel(folder: Path) -> None:
    processes = [start(COMPILE, folder) for _ in range(3)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    found = [json.loads(process.communicate(timeout=100)[0]) for process in processes]
    assert [sorted(kernel) for kernel in zip(*found, strict=True)] == 3 * [[False, True, True]]


def waiting() -> tuple[threading.Thread, list[Any]]:
    """A thread that wants the kernel, and what it gets."""
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(OneCompiles("kernel").get_group("it.json")))
    thread.start()
    thread.join(0.2)
    return thread, got


def test_it_is_found_by_those_that_wait(folder: Path) -> None:
    manager = OneCompiles("kernel")
    assert manager.get_group("it.json") is None
    thread, got = waiting()
    assert thread.is_alive()
    group = {"it.json": manager.put("{}", "it.json")}
    manager.put_group("it.json", group)
    thread.join(5)
    assert got == [group]
    assert OneCompiles("kernel").get_group("it.json") == group


def test_when_the_compiler_fails_the_next_one_tries() -> None:
    manager = OneCompiles("kernel")
    manager.get_group("it.json")
    thread, got = waiting()
    assert thread.is_alive()
    del manager
    thread.join(5)
    assert got == [None]


def test_when_the_one_that_compiles_is_killed_the_next_one_does() -> None:
    told, tell = FORK.Pipe(duplex=False)

    def hold() -> None:
        manager = OneCompiles("kernel")
        tell.send(manager.get_group("it.json"))
        time.sleep(60)

    process = FORK.Process(target=hold)
    process.start()
    assert told.recv() is None
    thread, got = waiting()
    assert thread.is_alive()
    process.kill()
    process.join()
    thread.join(5)
    assert got == [None]


def test_one_that_is_stuck_is_not_waited_for_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_once, "PATIENCE", 0.05)
    manager = OneCompiles("kernel")
    manager.get_group("it.json")
    assert OneCompiles("kernel").get_group("it.json") is None


def test_without_locks_each_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    managers = [OneCompiles("kernel") for _ in range(2)]
    assert [manager.get_group("it.json") for manager in managers] == [None, None]
    managers[0].put_group("it.json", {"it.json": managers[0].put("{}", "it.json")})
    assert managers[1].get_group("it.json")


def test_a_cache_that_the_user_chose_stays(manager_class: Any) -> None:
    compile_once.compile_once()
    assert manager_class.manager_class is OneCompiles
    manager_class.manager_class = FileCacheManager
    compile_once.compile_once()
    assert manager_class.manager_class is FileCacheManager
