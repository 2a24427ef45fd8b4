"""Engines that are closed, deleted, interrupted, or live beside others leave nothing behind."""

from __future__ import annotations

import functools
import gc
import logging
import multiprocessing as mp
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from importlib.metadata import distributions
from itertools import count, product
from pathlib import Path
from types import FrameType

import pytest
import torch
from conftest import Oracle, greedy, whole_only
from safetensors.torch import load_file
from tqdm import tqdm
from tqdm.std import TqdmDefaultWriteLock

from nanoinfer import BUNDLED_MODEL, LLM, SamplingParams
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.engine.results.stats import Rates
from nanoinfer.process import interrupts
from nanoinfer.process.collector import MANY, NEVER, no_full_collection
from nanoinfer.process.interrupts import delayed_interrupt
from nanoinfer.runner.memory.holdings import Holdings
from nanoinfer.runner.memory.plan import CPU_BUDGET
from nanoinfer.runner.steps.pending_tokens import PendingTokens

CUDA_ERROR = """
import gc
import sys

import torch

from nanoinfer import BUNDLED_MODEL, LLM, SamplingParams
from nanoinfer.runner.model_runner import ModelRunner

when, ranks, failing = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
healthy, calls = ModelRunner.run, []


def run(self, message):
    calls.append(message)
    if self.tp.rank == failing and len(calls) == 20:
        torch.zeros(1, device=self.device)[torch.tensor([1], device=self.device)]
        if when == "before":
            torch.cuda.synchronize()
    return healthy(self, message)


ModelRunner.run = run


def attempt(what, *args, **kwargs):
    try:
        what(*args, **kwargs)
    except Exception as error:
        print(type(error).__name__, str(error).partition("\\n")[0])
    gc.collect()


if __name__ == "__main__":
    llm = LLM(BUNDLED_MODEL, device="cuda", tensor_parallel_size=ranks, num_kvcache_blocks=64)
    params = SamplingParams(max_tokens=60, logprobs=2, ignore_eos=True)
    attempt(llm.generate, [[30 + i] for i in range(40)], params, use_tqdm=False)
    attempt(llm.generate, [[30]], params, use_tqdm=False)
    attempt(llm.close)
    del llm
    gc.collect()
    print("goes on")
"""

LISTENS = """
import os
import sys
from pathlib import Path

from nanoinfer import BUNDLED_MODEL, LLM

LISTENING, STATE, INODE = "0A", 3, 9  # a state, and two columns, of /proc/net/tcp


def is_listening():
    lines = [line for name in ("tcp", "tcp6") for line in Path("/proc/self/net", name).read_text().splitlines()]
    table = [line.split() for line in lines]
    listening = {f"socket:[{row[INODE]}]" for row in table if row[STATE] == LISTENING}
    return any(os.path.realpath(file).rpartition("/")[2] in listening for file in Path("/proc/self/fd").iterdir())


if __name__ == "__main__":
    with LLM(BUNDLED_MODEL, device=sys.argv[1], tensor_parallel_size=2, num_kvcache_blocks=16) as llm:
        llm.generate([[30]], use_tqdm=False)
        print(is_listening())
    del llm
    print(is_listening())
"""

FINDS = """
from importlib.util import find_spec
from pathlib import Path

print(Path(find_spec("nanoinfer").origin or "a namespace").name)
"""
IMPORTS = """
from pathlib import Path

import nanoinfer
from nanoinfer import LLM, WorkerError

print(Path(nanoinfer.__file__).name)
"""


def resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_close_is_safe_to_call_twice_and_with_closes() -> None:
    with LLM(BUNDLED_MODEL, num_kvcache_blocks=16) as llm:
        llm.generate([[30]], greedy(2), use_tqdm=False)
    assert llm.engine.ranks.is_closed
    llm.close()


@pytest.mark.parametrize("script", [FINDS, *whole_only([IMPORTS])], ids=["finds", "imports"])
def test_a_script_beside_the_clone_imports_it(script: str, tmp_path: Path) -> None:
    """The clone's folder has the package's name, and no __init__.py."""
    if not list(distributions(name="nanoinfer")):
        pytest.skip("nanoinfer is not installed")
    (tmp_path / "nanoinfer").symlink_to(Path(__file__).parent.parent)
    (tmp_path / "script.py").write_text(script)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == "__init__.py\n", done.stderr


def test_the_memory_plan_is_told_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="nanoinfer"), LLM(BUNDLED_MODEL, num_kvcache_blocks=128) as llm:
        llm.generate([[30]], greedy(2), use_tqdm=False)
        plan = llm.memory
        assert llm.config.num_kvcache_blocks == plan.blocks == 128
        assert plan.block_bytes * plan.blocks == llm.engine.ranks.runner.steps.kv_cache.nbytes
        limits = plan.max_model_len, plan.max_position
        assert limits == (llm.config.max_model_len, llm.config.description.max_position) == (2048, 2048)
    assert [record.getMessage() for record in caplog.records] == [str(plan), repr(llm)]
    assert "128 blocks" in str(plan)
    assert "max_model_len=2048 of the model's 2048" in str(plan)


@pytest.mark.parametrize("use_tqdm", [True, False])
def test_a_call_leaves_it_open_how_processes_start(use_tqdm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a bar of ours give the user's own bars a lock. Other tests start processes, and so settle it here."""
    monkeypatch.delattr(tqdm, "_lock", raising=False)
    monkeypatch.delattr(TqdmDefaultWriteLock, "mp_lock", raising=False)
    before = mp.get_start_method(allow_none=True)
    mp.set_start_method(None, force=True)
    try:
        with LLM(BUNDLED_MODEL, num_kvcache_blocks=16) as llm:
            llm.generate([[30]], greedy(2), use_tqdm=use_tqdm)
        assert mp.get_start_method(allow_none=True) is None
    finally:
        mp.set_start_method(before, force=True)
    assert not hasattr(tqdm, "_lock")


def test_on_the_cpu_what_is_used_is_the_model() -> None:
    """Its parameters, of which it packs some, and its table of cosines. Beside these, the cache may have 4 GiB."""
    with LLM(BUNDLED_MODEL, device="cpu") as llm:
        plan = llm.memory
        table = llm.config.max_model_len * llm.config.description.largest_head * 4
    stored = sum(tensor.numel() for tensor in load_file(f"{BUNDLED_MODEL}/model.safetensors").values())
    assert plan.used == 4 * stored + table < plan.total
    assert plan.limit - plan.used == CPU_BUDGET
    assert plan.blocks == CPU_BUDGET // plan.block_bytes
    assert "used 0.011," in str(plan)


def test_deletion_frees_the_cache_and_the_weights() -> None:
    llm = LLM(BUNDLED_MODEL, num_kvcache_blocks=16)
    llm.generate([[30]], greedy(2), use_tqdm=False)
    held = [weakref.ref(llm.engine.ranks.runner.steps.kv_cache), weakref.ref(llm.engine.ranks.runner.steps.model)]
    del llm
    gc.collect()
    assert [ref() for ref in held] == [None, None]


@pytest.mark.whole
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu)])
def test_behind_close_of_two_ranks_no_socket_listens(device: str, tmp_path: Path) -> None:
    """The ranks' own rendezvous listens before, so that the script is known to see what listens."""
    script = tmp_path / "script.py"
    script.write_text(LISTENS)
    done = subprocess.run([sys.executable, str(script), device], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "False"], done.stderr


def test_behind_a_cuda_error_pinned_memory_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """PyTorch aborts the process when it frees some."""

    def fail(_: object) -> None:
        raise torch.AcceleratorError("CUDA error: something\nSearch for more")

    llm = LLM(BUNDLED_MODEL, device="cpu", num_kvcache_blocks=16)
    llm.generate([[30]], greedy(2), use_tqdm=False)
    monkeypatch.setattr(PendingTokens, "is_done", property(fail))
    monkeypatch.setattr(Holdings, "close", fail)
    pinned = [weakref.ref(tokens._host) for tokens in llm.engine.ranks.runner._sent]
    with pytest.raises(torch.AcceleratorError, match="CUDA error: something"):
        llm.generate([[30]], greedy(2), use_tqdm=False)
    llm.close()
    del llm
    gc.collect()
    assert [ref() is None for ref in pinned] == [False]
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert warning == "the memory of cpu comes back when this process ends, because of CUDA error: something"


@pytest.mark.parametrize(
    ("when", "ranks", "failing"),
    [
        pytest.param("before", 1, 0, marks=pytest.mark.gpu),
        pytest.param("during", 1, 0, marks=pytest.mark.gpu),
        pytest.param("during", 2, 0, marks=pytest.mark.multi_gpu),
        pytest.param("during", 2, 1, marks=pytest.mark.multi_gpu),
        *whole_only(pytest.param("before", 2, failing, marks=pytest.mark.multi_gpu) for failing in (0, 1)),
    ],
)
def test_a_cuda_error_reaches_the_script_and_the_script_goes_on(
    tmp_path: Path, when: str, ranks: int, failing: int
) -> None:
    """when: whether a step's launch meets the error, or the error comes while the host goes on"""
    script = tmp_path / "cuda_error.py"
    script.write_text(CUDA_ERROR)
    command = [sys.executable, str(script), when, str(ranks), str(failing)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    error = "CUDA error: device-side assert triggered"
    *_, first, second, last = done.stdout.splitlines()  # CUDA may print, too
    if failing == 0:
        assert first == f"AcceleratorError {error}"
    else:
        assert first.startswith("WorkerError tensor-parallel rank 1 died: ")
    assert second.startswith("AcceleratorError" if ranks == 1 else "WorkerError this LLM is closed, make another: ")
    assert last == "goes on"
    assert error in done.stderr


def test_generate_makes_no_full_collections(make_llm: Callable[..., LLM]) -> None:
    """Of a hundred thousand outputs each would take half a second, and find nothing."""
    llm, before, during = make_llm(), gc.get_threshold(), []
    llm.engine.on_step = lambda _: during.append(gc.get_threshold())
    llm.generate([[30]], greedy(2), use_tqdm=False)
    assert set(during) == {(MANY, before[1], NEVER)}
    assert gc.get_threshold() == before
    llm.engine.on_step = lambda _: 1 / 0
    with pytest.raises(ZeroDivisionError):
        llm.generate([[30]], greedy(2), use_tqdm=False)
    assert gc.get_threshold() == before


def test_blocks_without_full_collections_may_overlap() -> None:
    before, first, second = gc.get_threshold(), no_full_collection(), no_full_collection()
    first.__enter__()
    second.__enter__()
    assert gc.get_threshold()[2] == NEVER
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == before


def test_a_collector_that_is_off_stays_off() -> None:
    before = gc.get_threshold()
    try:
        gc.set_threshold(0, *before[1:])
        with no_full_collection():
            assert gc.get_threshold()[0] == 0
        assert gc.get_threshold() == (0, *before[1:])
    finally:
        gc.set_threshold(*before)


def test_a_forked_child_leaves_its_parents_engine_alone(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(device="cpu")
    pid = os.fork()
    if pid == 0:
        llm.close()
        os._exit(0 if hasattr(llm.engine.ranks.runner, "steps") else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_two_engines_at_once_do_not_mix(make_llm: Callable[..., LLM], oracle: Oracle) -> None:
    first, second = make_llm(), make_llm(max_num_seqs=2)
    expected = [oracle.greedy([30], 12)]
    seqs = [seq for llm in (first, second) for seq in llm.engine.add_request([30], greedy(12))]
    while not (first.engine.is_finished and second.engine.is_finished):
        first.engine.step()
        second.engine.step()
    assert [seq.output_token_ids for seq in seqs] == expected * 2


@pytest.mark.whole
def test_ten_engines_one_after_another_do_not_grow() -> None:
    def serve() -> None:
        with LLM(BUNDLED_MODEL, device="cpu") as llm:
            llm.generate([[30] * 100] * 8, greedy(4), use_tqdm=False)

    for _ in range(3):
        serve()
    before = resident_bytes()
    for _ in range(10):
        serve()
    assert resident_bytes() - before < 16 << 20  # one engine holds more than that


def test_an_interrupted_generate_leaves_the_engine_usable(
    make_llm: Callable[..., LLM], oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(kvcache_block_size=16)
    step, calls = llm.engine.step, 0

    def interrupted() -> object:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[40 + i] * 20 for i in range(5)], greedy(20), use_tqdm=False)
    manager = llm.engine.scheduler.block_manager
    assert manager.num_free == len(manager.blocks)
    prompts = [[30], [30, 31, 32]]
    outputs = llm.generate(prompts, greedy(12), use_tqdm=False)
    assert [output["token_ids"] for output in outputs] == [oracle.greedy(prompt, 12) for prompt in prompts]


HOST_FILES = (
    "llm.py",
    "progress.py",
    "request.py",
    "requests.py",
    "sample.py",
    "tasks.py",
    "results.py",
    "llm_engine.py",
    "ranks.py",
    "step.py",
    "scheduler.py",
    "text_slots.py",
    "draws.py",
    "block_manager.py",
    "message.py",
    "sequence.py",
)


@functools.cache
def is_of_package(file: str, names: tuple[str, ...]) -> bool:
    """Whether it is a file of the package with one of these names. The answers are kept: each call asks."""
    path = Path(file)
    return "nanoinfer" in path.parts and path.name in names


class Interrupt:
    """A trace function that counts the lines that the host executes, and raises KeyboardInterrupt at one of them."""

    def __init__(self, line: int | None = None) -> None:
        self.line = line
        self.count = 0

    def __call__(self, frame: FrameType, event: str, arg: object) -> Interrupt | None:
        if event == "call":
            return self if is_of_package(frame.f_code.co_filename, HOST_FILES) else None
        if event == "line":
            self.count += 1
            if self.count == self.line:
                raise KeyboardInterrupt
        return self


DRAFTING = [{"speculation": "suffix"}, {"speculation": "draft", "draft_model": BUNDLED_MODEL}]


@pytest.mark.parametrize(
    ("drafting", "stride"),
    [({}, 1544), *whole_only([({}, 193), *product(DRAFTING, [386])])],
    ids=str,
)
def test_an_interrupt_at_any_line_leaves_the_engine_usable(
    drafting: dict[str, str], stride: int, make_llm: Callable[..., LLM]
) -> None:
    """The requests have samples, stop strings, chunks and preemptions. The test interrupts at every so many lines.

    An interrupt may leave other prefixes cached, by which later runs have other preemptions, and more lines or fewer.
    """
    blocks = {"kvcache_block_size": 16, "num_kvcache_blocks": 7, "max_model_len": 100, "max_num_batched_tokens": 20}
    llm = make_llm(device="cpu", **drafting, **blocks)
    prompts = [list(range(30, 57)), [40] * 18, [31], [50, 51] * 3]
    params = [
        SamplingParams(n=3, max_tokens=9, seed=1, top_k=5, stop=["the", "never"]),
        greedy(20, repetition_penalty=1.2, stop="never"),
        SamplingParams(max_tokens=7, logprobs=1, prompt_logprobs=1, seed=3, ignore_eos=True),
        greedy(12, stop="never"),
    ]

    def generate(trace: Interrupt) -> list[list[list[int]]]:
        sys.settrace(trace)
        try:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        finally:
            sys.settrace(None)
        return [[sample["token_ids"] for sample in output["samples"]] for output in outputs]

    expected = generate(Interrupt())
    assert llm.engine.scheduler.num_preemptions > 0
    whole = Interrupt()  # counts the lines of a run that finds its prefixes cached
    assert generate(whole) == expected
    manager = llm.engine.scheduler.block_manager
    for number, line in enumerate(count(1, stride)):
        trace = Interrupt(line)
        try:
            assert generate(trace) == expected
            break
        except KeyboardInterrupt:
            pass
        assert not llm.has_unfinished_requests()
        assert manager.num_free == len(manager.blocks), f"interrupted at line {line}"
        if number % 5 == 0:
            assert generate(Interrupt()) == expected, f"interrupted at line {line}"
    assert whole.count * 4 // 5 < line
    assert trace.count < line, "no interrupt is lost"


def test_what_a_second_interrupt_leaves_is_dropped_by_the_next_call(
    make_llm: Callable[..., LLM], oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, abort_all, interrupts = make_llm(), LLMEngine.abort_all, []

    def interrupted_once(engine: LLMEngine) -> None:
        if not interrupts:
            interrupts.append(True)
            raise KeyboardInterrupt
        abort_all(engine)

    monkeypatch.setattr(LLMEngine, "abort_all", interrupted_once)
    for call in (llm.has_unfinished_requests, lambda: llm.generate([], use_tqdm=False), llm.step):
        interrupts.clear()
        stream = llm.stream([[31], [32]], greedy(20))
        next(stream)
        with pytest.raises(KeyboardInterrupt):
            stream.close()
        assert llm.engine.scheduler.running
        assert not call()
        assert llm.engine.is_finished
    (output,) = llm.generate([[30]], greedy(12), use_tqdm=False)
    assert output["token_ids"] == oracle.greedy([30], 12)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


class TestDelayedInterrupt:
    """Ctrl-C waits while all ranks do something together; a second Ctrl-C does not wait."""

    def run(self, *calls: Callable[[], object]) -> None:
        with delayed_interrupt():
            for call in calls:
                call()

    def test_it_comes_at_the_end_of_the_block(self) -> None:
        done: list[str] = []
        with pytest.raises(KeyboardInterrupt):
            self.run(interrupt, lambda: done.append("the rest"))
        assert done == ["the rest"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def test_one_that_comes_again_comes_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(interrupts, "AGAIN_SECONDS", 0.05)
        done: list[str] = []
        with pytest.raises(KeyboardInterrupt) as caught:
            self.run(interrupt, lambda: time.sleep(0.1), interrupt, lambda: done.append("the rest"))
        assert done == []
        assert caught.value.__context__ is None  # the error does not repeat the first one
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def test_one_block_inside_another_does_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The second Ctrl-C comes at once there, too, and the first at the end of the outer one."""
        monkeypatch.setattr(interrupts, "AGAIN_SECONDS", 0.05)
        done: list[str] = []
        inner = functools.partial(
            self.run, interrupt, lambda: time.sleep(0.1), interrupt, lambda: done.append("the rest")
        )
        with pytest.raises(KeyboardInterrupt):
            self.run(inner)
        assert done == []
        with pytest.raises(KeyboardInterrupt):
            self.run(functools.partial(self.run, interrupt), lambda: done.append("the rest"))
        assert done == ["the rest"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def test_two_of_one_key_press_are_one(self) -> None:
        done: list[str] = []
        with pytest.raises(KeyboardInterrupt):
            self.run(interrupt, interrupt, lambda: done.append("the rest"))
        assert done == ["the rest"]

    def test_an_error_of_the_block_is_told_with_it(self) -> None:
        with pytest.raises(KeyboardInterrupt) as caught:
            self.run(interrupt, lambda: [].pop())
        assert isinstance(caught.value.__context__, IndexError)

    def test_the_users_own_handler_gets_it(self) -> None:
        calls: list[tuple[int, FrameType | None]] = []

        def handler(number: int, frame: FrameType | None) -> None:
            calls.append((number, frame))

        before = signal.signal(signal.SIGINT, handler)
        try:
            self.run(interrupt, lambda: calls.append((0, None)))
            assert signal.getsignal(signal.SIGINT) is handler
        finally:
            signal.signal(signal.SIGINT, before)
        assert [number for number, _ in calls] == [0, signal.SIGINT]
        frame = calls[1][1]
        assert frame is not None
        assert frame.f_code is interrupt.__code__

    def test_who_ignores_it_goes_on_ignoring(self) -> None:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            with delayed_interrupt():
                interrupt()
                assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        finally:
            signal.signal(signal.SIGINT, before)

    def test_another_thread_is_let_alone(self) -> None:
        handlers = []

        def look() -> None:
            with delayed_interrupt():
                handlers.append(signal.getsignal(signal.SIGINT))

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert handlers == [signal.getsignal(signal.SIGINT)]


def test_each_steps_time_counts_for_its_own_kind(make_llm: Callable[..., LLM]) -> None:
    """The engine prefills a long prompt at many times the tokens per second at which it decodes a few tokens."""
    llm, rates = make_llm(), Rates()
    llm.engine.add_request([30] * 1500, greedy(30, ignore_eos=True))
    while not llm.engine.is_finished:
        rates.add(llm.engine.step())
    decode, prefill = re.fullmatch(r"decode ([\d,]+) tok/s, prefill ([\d,]+) tok/s", str(rates)).groups()
    prefill_seconds, decode_seconds = 1500 / int(prefill.replace(",", "")), 29 / int(decode.replace(",", ""))
    assert decode_seconds > prefill_seconds / 10
    assert prefill_seconds > decode_seconds / 100


def test_the_progress_bar_counts_requests_and_rates(
    make_llm: Callable[..., LLM], capsys: pytest.CaptureFixture
) -> None:
    llm = make_llm()
    llm.generate([[30], [31]], greedy(3), use_tqdm=True)
    bar = capsys.readouterr().err
    assert "2/2" in bar
    assert "prefill" in bar
    assert "decode" in bar
    llm.generate([[30], [31]], greedy(3), use_tqdm=False)
    assert capsys.readouterr().err == ""
