"""Several ranks give one rank's tokens, their channel loses nothing, and no process survives when one dies."""

from __future__ import annotations

import errno
import gc
import multiprocessing as mp
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import (
    Oracle,
    alive,
    assert_equal,
    different_settings,
    greedy,
    of_each_kind,
    wait_until,
    whole_only,
)

from nanoinfer import BUNDLED_MODEL, LLM, SamplingParams
from nanoinfer.engine.ranks import workers
from nanoinfer.engine.ranks.workers import WorkerError, Workers
from nanoinfer.parallel import tensor_parallel
from nanoinfer.parallel.channel import Receiver, Sender
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.runner import rank
from nanoinfer.runner.message import DecodeMessage
from nanoinfer.runner.model_runner import ModelRunner
from nanoinfer.runner.start.trials import Trials


def token_ids(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


def shared_names(workers: Workers) -> list[Path]:
    """Return the names in /dev/shm of an engine's channel: the segment, and each worker's semaphore."""
    sender = workers.sender
    semaphores = [semaphore._semlock.name.lstrip("/") for semaphore in sender.semaphores]
    return [Path("/dev/shm") / name for name in (sender.memory.name, *(f"sem.{name}" for name in semaphores))]


@dataclass
class Remains:
    """The processes, files and ports that an engine of several ranks might leave behind."""

    pids: list[int]
    names: list[Path]
    port: int

    @classmethod
    def of(cls, llm: LLM) -> Remains:
        workers = llm.engine.ranks.workers
        return cls([process.pid for process in workers.processes], shared_names(workers), workers.store.port)

    def check_gone(self) -> None:
        assert not any(alive(pid) for pid in self.pids)
        assert not any(name.exists() for name in self.names)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that linger do not count
            probe.bind(("127.0.0.1", self.port))


MAKE_TWO = """
import multiprocessing
from nanoinfer import LLM, BUNDLED_MODEL, SamplingParams

if __name__ == "__main__":
    with LLM(BUNDLED_MODEL, device="cpu", tensor_parallel_size=2, num_kvcache_blocks=16) as llm:
        outputs = llm.generate([[30]], SamplingParams(max_tokens=3))
        multiprocessing.set_start_method("forkserver")  # which nothing has settled, not even the bar
        print([[len(output["token_ids"])] for output in outputs])
"""


class TestTwoRanks:
    """Greedy tokens in float32, on two CPU processes that talk through gloo."""

    def test_fresh_then_prefix_cached_then_chunked_and_preempted(
        self,
        make_llm: Callable[..., LLM],
        mixed_prompts: list[list[int]],
        mixed_expected: list[list[int]],
    ) -> None:
        options = {"device": "cpu", "tensor_parallel_size": 2, "kvcache_block_size": 16}
        llm = make_llm(**options)
        assert 2.7e6 * 4 / 2 < llm.memory.used < 2.8e6 * 4 / 2 + (1 << 20)  # its share of the parameters, and a table
        for _ in range(2):
            assert token_ids(llm, mixed_prompts[:9], greedy()) == mixed_expected[:9]
        llm.close()
        tight = make_llm(**options, max_model_len=340, num_kvcache_blocks=36, max_num_batched_tokens=64)
        assert token_ids(tight, mixed_prompts[:16], greedy()) == mixed_expected[:16]
        assert tight.engine.scheduler.num_preemptions > 0

    def test_an_untied_model_whose_vocabulary_does_not_divide(
        self, make_llm: Callable[..., LLM], make_qwen3: Callable[..., str]
    ) -> None:
        folder = make_qwen3(tie_word_embeddings=False, vocab_size=511, shards=3)
        assert len(list(Path(folder).glob("*.safetensors"))) > 1
        oracle = Oracle(folder)
        prompts = [[30], [31, 32, 33, 510], [5] * 40]
        two = make_llm(folder, device="cpu", tensor_parallel_size=2)
        assert token_ids(two, prompts, greedy(12)) == [oracle.greedy(prompt, 12) for prompt in prompts]
        params = SamplingParams(temperature=1.0, max_tokens=12, seed=3)
        one = make_llm(folder, device="cpu")
        assert token_ids(two, prompts, params) == token_ids(one, prompts, params)

    def test_one_kv_head_for_both_ranks(self, make_llm: Callable[..., LLM], make_qwen3: Callable[..., str]) -> None:
        folder = make_qwen3(num_key_value_heads=1)
        oracle = Oracle(folder)
        prompts = [[30], [31, 32, 33, 500], [5] * 40]
        llm = make_llm(folder, device="cpu", tensor_parallel_size=2)
        keys, _ = llm.engine.ranks.runner.steps.kv_cache.layers[0]
        assert keys.shape[2] == 1
        assert token_ids(llm, prompts, greedy(12)) == [oracle.greedy(prompt, 12) for prompt in prompts]

    def test_settings_of_a_class_that_the_other_rank_does_not_know(self, make_llm: Callable[..., LLM]) -> None:
        @dataclass
        class Own(SamplingParams):
            pass

        class Token(int):
            pass

        settings = {"max_tokens": 4, "seed": 1, "top_k": 5, "stop_token_ids": [Token(7)]}
        llm = make_llm(device="cpu", tensor_parallel_size=2)
        assert token_ids(llm, [[30]], Own(**settings)) == token_ids(llm, [[30]], SamplingParams(**settings))

    def test_nothing_is_left_after_close(self, make_llm: Callable[..., LLM]) -> None:
        llm = make_llm(device="cpu", tensor_parallel_size=2)
        (process,) = llm.engine.ranks.workers.processes
        segment, semaphore = shared_names(llm.engine.ranks.workers)
        assert not segment.exists()  # unlinked once the worker has attached
        assert semaphore.exists()
        llm.close()
        assert not alive(process.pid)
        assert not semaphore.exists()

    def test_a_worker_that_is_stopped_for_a_moment_goes_on(self, make_llm: Callable[..., LLM], oracle: Oracle) -> None:
        llm = make_llm(device="cpu", tensor_parallel_size=2, worker_timeout=5)
        (process,) = llm.engine.ranks.workers.processes
        os.kill(process.pid, signal.SIGSTOP)
        threading.Timer(1.5, os.kill, (process.pid, signal.SIGCONT)).start()
        assert token_ids(llm, [[30]], greedy(12)) == [oracle.greedy([30], 12)]

    @pytest.mark.usefixtures("spawned")
    def test_a_worker_that_dies_while_starting_is_not_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        start = mp.context.SpawnProcess.start

        def start_and_kill(process: mp.context.SpawnProcess) -> None:
            start(process)
            os.kill(process.pid, signal.SIGKILL)

        monkeypatch.setattr(mp.context.SpawnProcess, "start", start_and_kill)
        begin = time.monotonic()
        with pytest.raises(WorkerError, match="rank 1 died: it ended with exit code -9"):
            LLM(BUNDLED_MODEL, device="cpu", tensor_parallel_size=2)
        assert time.monotonic() - begin < 10

    def test_a_rank_that_dies_between_ready_and_the_rendezvous_is_not_waited_for(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tensor_parallel, "RENDEZVOUS_TIMEOUT", timedelta(seconds=1))
        store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        store.set("rank 1 is ready", "")
        begin = time.monotonic()
        with pytest.raises((WorkerError, RuntimeError)):
            tensor_parallel.TensorParallel(0, 2, store).connect()
        assert time.monotonic() - begin < 10

    def test_an_error_of_every_rank_is_the_users_own(self, tmp_path: Path) -> None:
        shutil.copytree(BUNDLED_MODEL, tmp_path / "m")
        (tmp_path / "m" / "model.safetensors").unlink()
        with pytest.raises(ValueError, match=r"has no \*\.safetensors file"):
            LLM(str(tmp_path / "m"), device="cpu", tensor_parallel_size=2)

    @pytest.mark.whole
    def test_a_script_without_the_main_guard_is_told_so(self, tmp_path: Path) -> None:
        script = tmp_path / "unguarded.py"
        script.write_text(
            "from nanoinfer import LLM, BUNDLED_MODEL\nLLM(BUNDLED_MODEL, device='cpu', tensor_parallel_size=2)\n"
        )
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode != 0
        assert "WorkerError: tensor-parallel rank 1 died" in done.stderr
        assert "__main__" in done.stderr

    def test_a_script_from_stdin_is_refused_at_once(self) -> None:
        """The ranks' processes cannot import a script from stdin."""
        done = subprocess.run(
            [sys.executable, "-"], input=MAKE_TWO, capture_output=True, text=True, timeout=100, check=False
        )
        assert "ValueError: tensor_parallel_size=2: every rank imports the main module, and " in done.stderr
        assert "<stdin> is no file; save the script as a file" in done.stderr
        assert done.stderr.count("Traceback") == 1  # no rank was started

    @pytest.mark.whole
    def test_a_command_that_has_no_file_works(self) -> None:
        """An interpreter's prompt and a notebook have no file either."""
        done = subprocess.run(
            [sys.executable, "-c", MAKE_TWO], capture_output=True, text=True, timeout=100, check=False
        )
        assert done.stdout == "[[3]]\n", done.stderr

    def test_a_daemonic_process_is_told_that_it_cannot_start_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(mp.current_process()._config, "daemon", True)
        with pytest.raises(ValueError, match=r"tensor_parallel_size=2: this process is daemonic.*ProcessPoolExecutor"):
            LLM(BUNDLED_MODEL, device="cpu", tensor_parallel_size=2)

    def test_a_forked_child_is_told_at_once_that_the_ranks_are_its_parents(
        self, make_llm: Callable[..., LLM], oracle: Oracle
    ) -> None:
        llm = make_llm(device="cpu", tensor_parallel_size=2)
        calls = (lambda: llm.generate([[30]]), lambda: llm.add_request([30]), llm.step)
        pid = os.fork()
        if pid == 0:
            begin, refused = time.monotonic(), 0
            for call in calls:
                try:
                    call()
                except RuntimeError as error:
                    refused += f"serve process {os.getppid()}, and not its fork" in str(error)
            mp.util._exit_function()  # as the interpreter does when a process ends
            os._exit(0 if refused == len(calls) and time.monotonic() - begin < 1 else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert token_ids(llm, [[30]], greedy(12)) == [oracle.greedy([30], 12)]

    def test_workers_do_not_outlive_a_killed_rank_0(self, tmp_path: Path) -> None:
        script = tmp_path / "killed.py"
        script.write_text(
            "import os, signal\n"
            "from nanoinfer import LLM, BUNDLED_MODEL\n"
            "if __name__ == '__main__':\n"
            "    llm = LLM(BUNDLED_MODEL, device='cpu', tensor_parallel_size=2, num_kvcache_blocks=8)\n"
            "    workers = llm.engine.ranks.workers\n"
            "    sender, (semaphore,) = workers.sender, workers.sender.semaphores\n"
            "    names = sender.memory.name, 'sem.' + semaphore._semlock.name.lstrip('/')\n"
            "    print(workers.processes[0].pid, *names, flush=True)\n"
            "    os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        done = subprocess.run(
            [sys.executable, str(script)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        pid, *names = done.stdout.splitlines()[-1].split()  # gloo may print before
        assert len(names) == 2
        assert wait_until(lambda: not alive(int(pid)))
        assert wait_until(lambda: not any(Path("/dev/shm", name).exists() for name in names))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make_two(make_llm: Callable[..., LLM], device: str) -> Callable[..., LLM]:
    """LLM(...) on two ranks."""
    return partial(make_llm, device=device, tensor_parallel_size=2, max_num_seqs=8)


class Nap:
    """An object that makes the process that unpickles it sleep."""

    def __reduce__(self) -> tuple[Callable[[float], None], tuple[float]]:
        return time.sleep, (60.0,)


def run_for_long(llm: LLM) -> None:
    llm.generate([[30]] * 500, greedy(1900, ignore_eos=True), use_tqdm=False)


def interrupt_after(seconds: float, *pids: int) -> None:
    gc.callbacks.clear()  # Python drops an interrupt inside one, and hypothesis has one
    for pid in pids:
        threading.Timer(seconds, os.kill, (pid, signal.SIGINT)).start()


Way = Callable[[LLM, list[list[int]], SamplingParams], object]


def generate(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> None:
    llm.generate(prompts, params, use_tqdm=False)


def stream(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> None:
    for _ in llm.stream(prompts, params):
        pass


def step(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> None:
    try:
        for prompt in prompts:
            llm.add_request(prompt, params)
        while llm.has_unfinished_requests():
            llm.step()
    finally:  # after an interrupt between two steps, requests remain
        for request_id in range(llm.engine.num_requests):
            llm.abort(request_id)
        llm.step()


class TestInterrupts:
    """Interrupts as by Ctrl-C, which every process of a terminal gets."""

    @pytest.mark.parametrize(("prompt_len", "max_tokens"), [(1900, 2), (2, 1900)], ids=["prefill", "decode"])
    @pytest.mark.parametrize("way", [generate, *whole_only([stream, step])])
    @pytest.mark.parametrize("moments", [(0.02, 0.1), *whole_only([pytest.param((0.0, 0.25, 0.5))])], ids=str)
    def test_interrupted_at_any_moment_the_ranks_go_on(
        self,
        moments: tuple[float, ...],
        way: Way,
        prompt_len: int,
        max_tokens: int,
        make_two: Callable[..., LLM],
        oracle: Oracle,
    ) -> None:
        llm = make_two(max_num_batched_tokens=512)
        pids = [os.getpid(), *Remains.of(llm).pids]
        prompts, params = [[30 + i] * prompt_len for i in range(300)], greedy(max_tokens, ignore_eos=True)
        expected = [oracle.greedy([30], 8)]

        def interrupt(seconds: float) -> None:
            interrupt_after(seconds, *pids)
            way(llm, prompts, params)

        for seconds in moments:
            with pytest.raises(KeyboardInterrupt):
                interrupt(seconds)
            assert not llm.has_unfinished_requests()
            assert token_ids(llm, [[30]], greedy(8)) == expected

    def test_interrupted_while_it_closes_an_llm_closes_whole(
        self, make_two: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        llm = make_two()
        remains = Remains.of(llm)
        workers = llm.engine.ranks.workers
        assert workers is not None
        stop = workers.stop

        def interrupted_stop(failed: bool = False) -> bool:
            os.kill(os.getpid(), signal.SIGINT)
            return stop(failed)

        monkeypatch.setattr(workers, "stop", interrupted_stop)
        with pytest.raises(KeyboardInterrupt):
            llm.close()
        remains.check_gone()

    def test_interrupted_while_it_looks_for_what_befell_the_ranks_it_ends_them(
        self, make_two: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        llm = make_two()
        remains = Remains.of(llm)

        def fail(message: object) -> None:
            interrupt_after(0.5, os.getpid())
            interrupt_after(2.0, os.getpid())
            raise RuntimeError("rank 0 has a problem")

        monkeypatch.setattr(llm.engine.ranks.runner.steps, "prefill", fail)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[30]], greedy(8), use_tqdm=False)
        remains.check_gone()
        with pytest.raises(WorkerError, match=r"closed.*rank 0 has a problem"):
            llm.generate([[30]])


class TestFailures:
    """After any failure the caller gets an error within seconds, nothing stays behind, and a new engine works."""

    @pytest.fixture(autouse=True)
    def soon_and_another_follows(self, make_two: Callable[..., LLM], oracle: Oracle) -> Iterator[None]:
        yield
        assert wait_until(lambda: not any(thread.name == "nanoinfer-watcher" for thread in threading.enumerate()))
        assert token_ids(make_two(), [[30]], greedy(8)) == [oracle.greedy([30], 8)]

    def test_a_worker_is_killed(self, make_two: Callable[..., LLM]) -> None:
        llm = make_two()
        remains = Remains.of(llm)
        threading.Timer(0.5, os.kill, (remains.pids[0], signal.SIGKILL)).start()
        begin = time.monotonic()
        with pytest.raises(WorkerError, match="rank 1 died: it ended with exit code -9"):
            run_for_long(llm)
        assert time.monotonic() - begin < 10
        remains.check_gone()
        assert llm.engine.ranks.is_closed
        with pytest.raises(WorkerError, match=r"closed.*rank 1 died: it ended with exit code -9"):
            llm.generate([[30]])

    def test_a_worker_is_stopped(self, make_two: Callable[..., LLM]) -> None:
        llm = make_two(worker_timeout=2)
        remains = Remains.of(llm)
        threading.Timer(0.5, os.kill, (remains.pids[0], signal.SIGSTOP)).start()
        begin = time.monotonic()
        with pytest.raises(WorkerError, match=r"rank 1 hangs: no sign of life for 2 s \(worker_timeout\)"):
            run_for_long(llm)
        assert time.monotonic() - begin < 10
        remains.check_gone()

    @pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.multi_gpu)])  # gloo waits longer
    def test_a_worker_is_stuck_while_its_process_runs(self, make_two: Callable[..., LLM]) -> None:
        llm = make_two(worker_timeout=2)
        remains = Remains.of(llm)
        llm.engine.ranks.workers.send("never called", (Nap(),))
        begin = time.monotonic()
        with pytest.raises(
            WorkerError, match=r"rank 1 is stuck: it has not begun the last step.* 2 s \(worker_timeout"
        ):
            run_for_long(llm)
        assert time.monotonic() - begin < 10
        remains.check_gone()

    def test_a_worker_raises(self, make_two: Callable[..., LLM]) -> None:
        llm = make_two()
        remains = Remains.of(llm)
        llm.engine.ranks.workers.send("no_such_method", ())
        with pytest.raises(WorkerError, match=r"(?s)rank 1 died: Traceback.*no_such_method"):
            llm.generate([[30]], greedy(50), use_tqdm=False)
        remains.check_gone()

    def test_a_kernel_fails_while_the_worker_waits(self, make_two: Callable[..., LLM]) -> None:
        """It looks after its device, as rank 0 does when it waits for tokens."""
        llm = make_two()
        remains = Remains.of(llm)
        llm.engine.ranks.workers.send("__dict__.update", ({"check_device": partial(int, "a kernel that failed")},))
        wait_until(lambda: not any(alive(pid) for pid in remains.pids))
        with pytest.raises(WorkerError, match=r"(?s)rank 1 died: Traceback.*a kernel that failed"):
            llm.generate([[30]], greedy(1), use_tqdm=False)
        remains.check_gone()

    @pytest.mark.usefixtures("spawned")
    def test_a_worker_is_stopped_while_starting(self, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(workers, "START_SECONDS", 3)
        start = mp.context.SpawnProcess.start

        def start_and_stop(process: mp.context.SpawnProcess) -> None:
            start(process)
            os.kill(process.pid, signal.SIGSTOP)

        monkeypatch.setattr(mp.context.SpawnProcess, "start", start_and_stop)
        with pytest.raises(WorkerError, match="rank 1 hangs: no sign of life for 3 s while starting"):
            LLM(BUNDLED_MODEL, device=device, tensor_parallel_size=2, worker_timeout=1)
        monkeypatch.undo()

    def test_an_engine_that_is_collected_on_the_watchers_own_thread(
        self, make_two: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        llm = make_two()
        remains, workers = Remains.of(llm), llm.engine.ranks.workers
        failures: list[object] = []
        monkeypatch.setattr(threading, "excepthook", failures.append)
        heartbeats = workers.sender.heartbeats

        def collect_and_look(worker: int) -> int:
            llm.close()
            return heartbeats(worker)

        workers.sender.heartbeats = collect_and_look
        assert wait_until(lambda: llm.engine.ranks.is_closed and not workers._watcher.is_alive())
        assert failures == []
        remains.check_gone()

    def test_rank_0_raises(self, make_two: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
        llm = make_two()
        remains = Remains.of(llm)

        def fail(message: object) -> None:
            raise RuntimeError("rank 0 has a problem")

        monkeypatch.setattr(llm.engine.ranks.runner, "_decode", fail)
        begin = time.monotonic()
        with pytest.raises(RuntimeError, match="rank 0 has a problem"):
            llm.generate([[30]], greedy(8), use_tqdm=False)
        assert time.monotonic() - begin < 10
        remains.check_gone()

    def test_one_rank_is_out_of_memory(self, make_two: Callable[..., LLM]) -> None:
        llm = make_two()
        remains = Remains.of(llm)
        llm.engine.ranks.workers.send("_make_cache", (1 << 34,))
        begin = time.monotonic()
        with pytest.raises(WorkerError, match=r"(?s)rank 1 died: Traceback.*(Unable to allocate|out of memory)"):
            llm.generate([[30]], greedy(50), use_tqdm=False)
        assert time.monotonic() - begin < 10
        remains.check_gone()

    @pytest.mark.usefixtures("spawned")
    def test_interrupted_while_loading(self, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The signal comes while the worker imports its modules, which takes seconds."""
        started: list[Workers] = []
        init = Workers.__init__

        def init_and_interrupt(workers: Workers, config: object) -> None:
            init(workers, config)
            started.append(workers)
            names.extend(shared_names(workers))
            interrupt_after(0.5, os.getpid())

        names: list[Path] = []
        monkeypatch.setattr(Workers, "__init__", init_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            LLM(BUNDLED_MODEL, device=device, tensor_parallel_size=2)
        assert not any(process.is_alive() for process in started[0].processes)
        assert not any(name.exists() for name in names)

    def test_a_second_interrupt_ends_a_step_that_hangs_and_the_ranks(self, make_two: Callable[..., LLM]) -> None:
        llm = make_two(worker_timeout=100)
        remains = Remains.of(llm)
        os.kill(remains.pids[0], signal.SIGSTOP)
        interrupt_after(0.5, os.getpid())
        interrupt_after(2.0, os.getpid())
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt, match="the ranks were interrupted in the middle of their work"):
            run_for_long(llm)
        assert time.monotonic() - begin < 10
        remains.check_gone()
        with pytest.raises(WorkerError, match="this LLM is closed, make another: the ranks were interrupted"):
            llm.generate([[30]])


SEND_ON_MOUNTS = """
import os, subprocess, sys, threading
from nanoinfer.parallel.channel import Receiver, Sender

message = b"x" * 2**20
for options in sys.argv[1:]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", "/dev/shm"], check=True)
    try:
        sender = Sender(num_workers=1)
    except RuntimeError as error:
        print(error, os.listdir("/dev/shm"))
        continue
    receiver, received = Receiver(sender.memory.name, sender.semaphores, 0), []
    thread = threading.Thread(target=lambda: received.append(receiver.receive()))
    thread.start()
    sender.send(message, lambda: None)
    thread.join()
    size = sender.memory.size
    receiver.semaphore = None  # a worker's goes with its process
    sender.close()
    print(f"segment of {size} bytes, whole: {received == [message]},", os.listdir("/dev/shm"))
"""


class TestChannel:
    def test_messages_of_any_size_arrive_whole_and_in_order(self) -> None:
        sender = Sender(num_workers=2, segment_bytes=4096)
        received: list[list[object]] = [[], []]

        def listen(worker: int) -> None:
            receiver = Receiver(sender.memory.name, sender.semaphores, worker)
            while (message := receiver.receive()) != "end":
                received[worker].append(message)

        threads = [threading.Thread(target=listen, args=(worker,)) for worker in range(2)]
        for thread in threads:
            thread.start()
        messages = [b"x" * size for size in (0, 1, 4000, 4096, 100_000, 3)]
        for message in [*messages, "end"]:
            sender.send(message, lambda: None)
        for thread in threads:
            thread.join(10)
        sender.close()
        assert received == [messages, messages]

    def test_little_or_no_shared_memory(self) -> None:
        """A smaller segment works too. If the memory is too small, the error says so, and nothing stays behind."""
        mounts = ["size=64k", "size=8k", "size=4k", "size=1m,nr_inodes=2", "size=1m,ro"]
        try_it = ["unshare", "--map-root-user", "--mount"]
        if subprocess.run([*try_it, "mount", "-t", "tmpfs", "none", "/dev/shm"], check=False).returncode:
            pytest.skip("mounting is not allowed")
        done = subprocess.run(
            [*try_it, sys.executable, "-c", SEND_ON_MOUNTS, *mounts], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        enough, least, full, inodes, read_only = done.stdout.splitlines()
        assert enough == "segment of 32768 bytes, whole: True, []"
        assert least == "segment of 4096 bytes, whole: True, []"
        assert re.search(r"/dev/shm, but it is full; .*--shm-size=1g.*free: 0 of 4 KiB, .* \[\]", full)
        assert re.search(r"it is out of inodes; .*nr_inodes=1m.*free: 1,024 of 1,024 KiB, 1 of 2 inodes\) \[\]", inodes)
        assert re.search(r"it is read-only; .*remount,rw.*free: 1,024 of 1,024 KiB, .* \[\]", read_only)

    def test_a_segment_takes_what_it_can_reserve(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def allocate(file: int, offset: int, num_bytes: int) -> None:
            if num_bytes > free:
                raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", allocate)
        free = 100_000
        sender = Sender(num_workers=1)
        assert sender.memory.size == 65536
        sender.close()
        free = 0
        with pytest.raises(RuntimeError, match=r"processes share memory in /dev/shm, but it is full"):
            Sender(num_workers=1)

    def test_a_full_channel_calls_check_which_may_raise(self) -> None:
        sender = Sender(num_workers=1)

        def check() -> None:
            raise WorkerError("gone")

        sender.send("first", check)
        with pytest.raises(WorkerError, match="gone"):
            sender.send("second", check)
        sender.close()
        sender.unlink()

    def test_who_waits_for_a_worker_that_does_not_read_is_told_in_time(self, make_llm: Callable[..., LLM]) -> None:
        workers = make_llm(device="cpu", tensor_parallel_size=2, worker_timeout=1).engine.ranks.workers
        workers.send("never called", (Nap(),))
        workers.send("not read", ())
        begin = time.monotonic()
        with pytest.raises(WorkerError, match=r"rank 1 is stuck: it has not begun the last step; .* 1 s"):
            workers.send("not written", ())
        assert time.monotonic() - begin < 5

    def test_a_steady_decode_message_is_small(self) -> None:
        message = ("run", (DecodeMessage([(255, 3)], 255, [(row, 5, 1000 + row) for row in range(8)], 900),))
        assert len(pickle.dumps(message, pickle.HIGHEST_PROTOCOL)) < 1024


def test_before_a_rank_meets_the_others_its_numbers_stand_for_all() -> None:
    tp = TensorParallel(rank=1, size=3)
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert tp.all_gather(x).tolist() == [x.tolist()] * 3
    assert tp.gather_features(x).tolist() == [[1, 2] * 3, [3, 4] * 3]
    assert tp.all_reduce(x) is x


@pytest.mark.parametrize(
    "options",
    of_each_kind(
        [
            {},
            {"deterministic": True},
            {"speculation": "suffix"},
            {"speculation": "suffix", "deterministic": True},
            {"speculation": "draft", "draft_model": BUNDLED_MODEL},
            {"max_adapters": 1},
        ],
        0,
    ),
)
def test_steps_need_no_other_rank_until_the_ranks_meet(
    options: dict[str, Any], make_llm: Callable[..., LLM], oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs kernels compile then, from steps that run torch's operations alone. Here the whole steps run."""
    ran = []

    @torch.inference_mode()
    def run_steps(runner: ModelRunner) -> None:
        steps = runner._make_cache(1)
        steps.kv_cache.zero()
        trials = Trials(runner.config, steps.max_blocks, runner.device)
        for message in (*trials.prefills(), *trials.largest_prefills()):
            steps.update(message)
            steps.prefill(message)
        for rows, kind in runner._largest_decodes(trials):
            steps.batch.positions.zero_()
            runner._decode_rows(rows, kind)
            ran.append(kind)

    monkeypatch.setattr(ModelRunner, "_compile", run_steps)
    small = {"max_num_seqs": 4, "max_model_len": 128, "max_num_batched_tokens": 256}
    llm = make_llm(device="cpu", tensor_parallel_size=2, **small, **options)
    assert any(kind.guesses for kind in ran) == ("speculation" in options)
    assert token_ids(llm, [[30], [31, 32]], greedy(12)) == [oracle.greedy([30], 12), oracle.greedy([31, 32], 12)]


def note_start(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which rank 0 adds what it does while it starts."""
    did: list[str] = []
    compile_steps, connect = rank.compile_steps, TensorParallel.connect
    monkeypatch.setattr(rank, "compile_steps", lambda *args: (did.append("compile"), compile_steps(*args)))
    monkeypatch.setattr(TensorParallel, "connect", lambda *args: (did.append("connect"), connect(*args)))
    return did


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.multi_gpu(n)) for n in (2, 4)])
class TestGPUs:
    """Float32 tokens equal those of one rank, through inboxes, NCCL and graphs."""

    @pytest.mark.parametrize("enforce_eager", [False, *whole_only([True])])
    def test_fresh_then_prefix_cached_then_chunked_and_preempted(
        self,
        ranks: int,
        enforce_eager: bool,
        make_llm: Callable[..., LLM],
        mixed_prompts: list[list[int]],
        mixed_expected: list[list[int]],
    ) -> None:
        options = {"tensor_parallel_size": ranks, "enforce_eager": enforce_eager, "kvcache_block_size": 16}
        llm = make_llm(**options, max_num_seqs=32)
        assert llm.engine.ranks.runner.tp.inbox is not None
        assert token_ids(llm, mixed_prompts, greedy()) == mixed_expected
        assert token_ids(llm, mixed_prompts, greedy()) == mixed_expected
        llm.close()
        tight = make_llm(**options, max_model_len=340, num_kvcache_blocks=48, max_num_batched_tokens=400)
        assert token_ids(tight, mixed_prompts, greedy()) == mixed_expected
        assert tight.engine.scheduler.num_preemptions > 0

    def test_kernels_compile_while_others_may_load(
        self, ranks: int, make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        did = note_start(monkeypatch)
        make_llm(tensor_parallel_size=ranks, max_num_seqs=8)
        assert did == ["compile", "connect"]

    def test_one_row_at_a_time(self, ranks: int, make_llm: Callable[..., LLM], oracle: Oracle) -> None:
        llm = make_llm(tensor_parallel_size=ranks, max_num_seqs=1)
        assert token_ids(llm, [[30], [31, 32]], greedy(64)) == [oracle.greedy([30], 64), oracle.greedy([31, 32], 64)]

    def test_devices_that_cannot_reach_each_other_use_nccl(
        self, ranks: int, make_llm: Callable[..., LLM], oracle: Oracle, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tensor_parallel, "can_reach_peers", lambda rank, size: False)
        did = note_start(monkeypatch)
        llm = make_llm(tensor_parallel_size=ranks, max_num_seqs=8)
        assert did == ["compile", "connect", "compile"]
        assert llm.engine.ranks.runner.tp.inbox is None
        assert token_ids(llm, [[30]] * 3, greedy(12)) == [oracle.greedy([30], 12)] * 3

    def test_an_untied_model_whose_vocabulary_and_heads_do_not_divide(
        self, ranks: int, make_llm: Callable[..., LLM], make_qwen3: Callable[..., str]
    ) -> None:
        folder = make_qwen3(tie_word_embeddings=False, vocab_size=511, num_key_value_heads=1)
        oracle = Oracle(folder)
        prompts = [[30], [31, 32, 33, 510], [5] * 40]
        several = make_llm(folder, tensor_parallel_size=ranks, max_num_seqs=8)
        assert token_ids(several, prompts, greedy(12)) == [oracle.greedy(prompt, 12) for prompt in prompts]
        params = SamplingParams(temperature=1.0, max_tokens=12, seed=3)
        one = make_llm(folder, max_num_seqs=8)
        assert token_ids(several, prompts, params) == token_ids(one, prompts, params)

    def test_every_setting(self, ranks: int, make_llm: Callable[..., LLM], mixed_prompts: list[list[int]]) -> None:
        prompts, params = [prompt[:50] for prompt in mixed_prompts], different_settings(len(mixed_prompts))
        prompts.append([30] * 40)
        params.append(SamplingParams(n=5, seed=4, max_tokens=20, top_p=0.9))
        several, one = (make_llm(tensor_parallel_size=size, kvcache_block_size=16) for size in (ranks, 1))
        expected = one.generate(prompts, params, use_tqdm=False)
        assert_equal(several.generate(prompts, params, use_tqdm=False), expected)
