"""The kernels of steps compile side by side before they run: each once, and none of them is launched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoinfer import LLM
from nanoinfer.kernels.launch import is_recording
from nanoinfer.process.bar import ignore
from nanoinfer.runner.message import PrefillMessage
from nanoinfer.runner.start import compiling
from nanoinfer.runner.start.compiling import compile_steps
from nanoinfer.runner.start.trials import Trials
from nanoinfer.runner.steps.kinds import PLAIN, DecodeKind
from nanoinfer.runner.steps.launched import Launched

SCRIPT = """
import json
import threading
import warnings

import torch
import triton
import triton.language as tl
from card_compiler import Machine
from triton import knobs
from triton.runtime import driver

from nanoinfer.kernels.compiling import compile_kernels


@triton.jit
def _add(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)


@triton.jit
def _wrong(x):
    tl.store(x, no_such_name)


class Launcher:
    def __init__(self, source, metadata):
        devices.add(device.of)

    def __call__(self, *_):
        launched.append(threading.current_thread().name)


compiled, loaded, launched, devices, seen, device = [], [], [], set(), [], threading.local()
knobs.compilation.listener = lambda metadata, **_: compiled.append(metadata["name"])
torch.cuda.set_device = lambda number: setattr(device, "of", number)
device.of = "of the caller"
machine = Machine()
machine.launcher_cls = Launcher
machine.utils.load_binary = lambda name, *_: (loaded.append(name) or 1, 1, 0, 0, 1024)
machine.utils.unload_module = lambda *_: None
driver.set_active(machine)
x = torch.ones(64)


def step(*blocks):
    for block in blocks:
        y = torch.empty_like(x)
        _add[(1,)](x, y, 64, BLOCK=block)
        seen.append(y.tolist() + torch.empty(2, dtype=torch.float8_e4m3fn).float().tolist())


def error_of(*steps):
    try:
        compile_kernels(steps, "the device")
    except Exception as error:
        return type(error).__name__


def launch_elsewhere():
    thread = threading.Thread(target=lambda: (setattr(device, "of", "another"), step(16)), name="another")
    thread.start()
    thread.join()


said = {"errors": [error_of(lambda: _wrong[(1,)](x)), error_of(lambda: 1 / 0)]}
compiled.clear()
filters = list(warnings.filters)
heard = []
compile_kernels([lambda: step(16), lambda: step(32, 16), lambda: step(32)], "the device", heard.append)
said["heard"] = sum(heard)
said |= {"compiled": len(compiled), "loaded": len(loaded), "devices": sorted(devices), "launched": list(launched)}
said["filters"] = warnings.filters == filters
said["zeros"] = not any(map(any, seen))
step(16, 32)
compile_kernels([lambda: step(16, 32), launch_elsewhere], "the device")
print(json.dumps({**said, "then": [len(compiled), launched]}))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the script tells, in a process that does not interpret kernels, and has a cache of its own."""
    folder = tmp_path_factory.mktemp("compiling")
    script = folder / "script.py"  # Triton reads the source of kernels
    script.write_text(SCRIPT)
    tests = Path(__file__).parent
    environment = {
        **{name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        "TRITON_CACHE_DIR": str(folder / "cache"),
        "PYTHONPATH": os.pathsep.join(map(str, (tests.parent, tests / "cases"))),
    }
    done = subprocess.run([sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout))


def test_each_kernel_is_compiled_once_and_loaded(said: dict[str, Any]) -> None:
    assert (said["compiled"], said["loaded"], said["heard"]) == (2, 2, 2)
    assert said["devices"] == ["the device"]


def test_none_is_launched(said: dict[str, Any]) -> None:
    assert said["launched"] == []


def test_steps_see_zeros_where_kernels_would_write(said: dict[str, Any]) -> None:
    assert said["zeros"]


def test_filters_of_warnings_stay(said: dict[str, Any]) -> None:
    assert said["filters"]


def test_later_launches_find_the_kernels(said: dict[str, Any]) -> None:
    compiled, launched = said["then"]
    assert compiled == 2
    assert launched[:2] == ["MainThread"] * 2


def test_what_is_compiled_already_is_not_launched_either_but_by_other_threads(said: dict[str, Any]) -> None:
    assert said["then"][1][2:] == ["another"]


def test_the_error_of_a_kernel_or_of_a_step_is_raised(said: dict[str, Any]) -> None:
    assert said["errors"] == ["CompilationError", "ZeroDivisionError"]


@torch.inference_mode()
def test_a_start_tries_prompts_of_all_sizes_and_each_decode_step_as_it_runs_later(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_llm(device="cpu", max_num_seqs=4, max_num_batched_tokens=600, max_model_len=300).engine.ranks.runner
    steps, decoded, lengths = runner.steps, [], []
    prefill = steps.prefill

    def note_decode(rows: int, kind: DecodeKind) -> None:
        decoded.append((rows, kind, is_recording()))

    def note_prefill(message: PrefillMessage) -> Launched:
        lengths.append([len(chunk.token_ids) for chunk in message.chunks])
        return prefill(message)

    monkeypatch.setattr(steps, "prefill", note_prefill)
    monkeypatch.setattr(compiling, "compile_kernels", lambda tried, *_: [step() for step in tried])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    trials = Trials(runner.config, steps.max_blocks, runner.device)
    compile_steps(steps, trials, [(4, PLAIN)], [(1, PLAIN), (2, PLAIN)], note_decode, ignore)
    assert decoded == [(4, PLAIN, False), (1, PLAIN, True), (2, PLAIN, True)]
    assert lengths == [[1], [2], [4], [8], [16], [32], [64], [128], [256], [150, 150, 150, 150]]
