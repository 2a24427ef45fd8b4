"""Workers: the processes of the ranks beside rank 0, and the thread that watches them."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
import time
from collections.abc import Callable
from copy import copy
from multiprocessing.connection import Connection, wait
from multiprocessing.spawn import get_preparation_data
from typing import Any

import torch.distributed as dist

from nanoinfer.config import Config
from nanoinfer.drafting.drafter import AtRankZero
from nanoinfer.parallel.channel import BEAT_SECONDS, Sender
from nanoinfer.parallel.patience import patience
from nanoinfer.process.first_launch import started_for
from nanoinfer.process.interrupts import interrupts_blocked
from nanoinfer.process.start_method import start_method_open
from nanoinfer.runner.worker import run_worker

VERDICT_SECONDS = 4 * BEAT_SECONDS  # rank 0 waits this much longer for a step, because the watcher's error says more
START_SECONDS = 120.0  # at least, while the ranks start: imports and drivers may hold the GIL for long
CLOSE_SECONDS = 5.0


class WorkerError(RuntimeError):
    """A tensor-parallel rank died or hangs, or an error or a Ctrl-C ended all ranks, or they were not called alike.

    With several replicas: none is left, or one died before all had started.

    The message names the rank that died or hangs, with its traceback if it left one. It names none if all ranks began
    the step that hangs, or if an error of rank 0 or a Ctrl-C ended them. Of a tensor_parallel_group it names ranks that
    were called otherwise, and what they were told.
    """


class Workers:
    """Ranks 1 and up, from spawn to exit."""

    def __init__(self, config: Config) -> None:
        """Start the processes, which import what they need and wait for `begin`. Of config, the options are enough."""
        ranks = config.tensor_parallel_size
        check_spawning(f"tensor_parallel_size={ranks}", "rank")
        store = dist.TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False)
        self.store: dist.TCPStore | None = store
        self.sender = Sender(ranks - 1)
        self.timeout = config.worker_timeout
        self.processes: list[Any] = []
        self.errors: list[Connection] = []
        self._reasons: dict[int, str] = {}  # rank -> why it is lost
        self._starting = True
        self._stopping = False
        self._watcher: threading.Thread | None = None
        context = mp.get_context("spawn")
        try:
            for rank in range(1, ranks):
                reading, writing = context.Pipe(duplex=False)
                process = context.Process(
                    target=run_worker,
                    args=(rank, store.port, self.sender.memory.name, self.sender.semaphores, writing),
                    name=f"nanoinfer-rank-{rank}",
                    daemon=True,
                )
                with started_for(config.device_of(rank)), start_method_open(), interrupts_blocked():
                    process.start()
                mp.process._children.discard(process)  # type: ignore[attr-defined]  # or a fork would end it at exit
                writing.close()
                self.processes.append(process)
                self.errors.append(reading)
        except BaseException:
            self.close()
            raise

    def begin(self, config: Config) -> None:
        """Let every worker build its model; raises WorkerError when one is dead."""
        self.check()
        if not isinstance(config.speculation, str | None):
            config = copy(config)
            config.speculation = AtRankZero()
        self.sender.send(config, self.check)  # a worker may still import: the watcher knows how long that may take

    def close(self) -> None:
        """Kill every worker; safe to call when all have ended."""
        self.stop(failed=True)
        self.join()

    def send(self, method: str, args: tuple[Any, ...]) -> None:
        """Make every worker call a method of its ModelRunner; raises WorkerError when one is dead."""
        self.check()
        self.sender.send((method, args), self.patience())

    def check(self) -> None:
        """Raise WorkerError if a worker is lost."""
        for rank in range(1, len(self.processes) + 1):
            if self._is_lost(rank):
                raise self._error(rank)

    def patience(self) -> Callable[[], None]:
        """Return a check to repeat while waiting for one step. It raises WorkerError also if that takes too long."""
        be_patient = patience(self.timeout + VERDICT_SECONDS, self._stuck)

        def check() -> None:
            self.check()
            be_patient()

        return check

    def _stuck(self) -> WorkerError:
        problem = f"a step was not done after {self.timeout:g} s (worker_timeout), though every process runs"
        for rank in range(1, len(self.processes) + 1):
            if not self.sender.has_read(rank - 1):
                return WorkerError(f"tensor-parallel rank {rank} is stuck: it has not begun the last step; {problem}")
        return WorkerError(f"the tensor-parallel ranks are stuck: {problem}")

    def _is_lost(self, rank: int) -> bool:
        process, errors = self.processes[rank - 1], self.errors[rank - 1]
        return rank in self._reasons or not process.is_alive() or errors.poll()

    def watch(self, on_loss: Callable[[], None]) -> None:
        """Call on_loss, on another thread, when a worker dies: rank 0 may be waiting for it inside a collective.

        The watching thread kills a worker that gives no sign of life.
        """

        def watch_until_loss() -> None:
            try:
                self._wait_for_loss()
            except (ValueError, OSError):  # the engine was collected on this thread, which closed the pipes
                if not self._stopping:
                    raise
            if not self._stopping:
                on_loss()

        self._watcher = threading.Thread(target=watch_until_loss, name="nanoinfer-watcher", daemon=True)
        self._watcher.start()

    def _wait_for_loss(self) -> None:
        ends = [*(process.sentinel for process in self.processes), *self.errors]
        beats, silence = [0] * len(self.processes), [0.0] * len(self.processes)
        # Count waits, not the time that has passed: a Ctrl-Z stops this process, too.
        while not wait(ends, timeout=BEAT_SECONDS):
            for worker, process in enumerate(self.processes):
                before, beats[worker] = beats[worker], self.sender.heartbeats(worker)
                silence[worker] = silence[worker] + BEAT_SECONDS if beats[worker] == before else 0.0
                limit, hint = self.timeout, "(worker_timeout)"
                if self._starting and limit < START_SECONDS:
                    limit, hint = START_SECONDS, "while starting; a larger worker_timeout is waited for longer"
                if silence[worker] > limit:
                    self._reasons[worker + 1] = f"hangs: no sign of life for {limit:g} s {hint}"
                    process.kill()

    def end_start(self) -> None:
        """End the start, when all ranks have built their models: remove the segment's name, and be less patient."""
        self._starting = False
        self.sender.unlink()

    def explain(self, error: BaseException, patience: float = 5.0) -> BaseException:
        """Return the cause of an error of rank 0: a dead worker's own error, if one dies within `patience` seconds."""
        if isinstance(error, KeyboardInterrupt):
            return KeyboardInterrupt("the ranks were interrupted in the middle of their work, and have ended")
        if isinstance(error, (WorkerError, ValueError)) or not isinstance(error, Exception):
            return error  # it names its cause itself
        sentinels = [process.sentinel for process in self.processes]
        if wait([*sentinels, *self.errors], timeout=patience):
            for rank in range(1, len(self.processes) + 1):
                if self._is_lost(rank):
                    return self._error(rank)
        return error

    def _error(self, rank: int) -> WorkerError:
        if rank not in self._reasons:
            self._reasons[rank] = self._reason(rank)
        return WorkerError(f"tensor-parallel rank {rank} {self._reasons[rank]}")

    def _reason(self, rank: int) -> str:
        process, pipe = self.processes[rank - 1], self.errors[rank - 1]
        try:
            if pipe.poll():
                return f"died: {pipe.recv()}"
        except EOFError:
            pass
        process.join(1)
        return f"died: it ended with exit code {process.exitcode} and left no traceback{hint_of(process)}"

    def stop(self, failed: bool = False) -> bool:
        """Tell every worker to end; kill all of them if one has failed, or does not listen.

        Returns whether they end by themselves, together with rank 0.
        """
        deadline = time.monotonic() + CLOSE_SECONDS
        failed = failed or self._stopping  # if so, they have been told to end before, or killed
        self._stopping = True

        def check() -> None:
            self.check()
            if time.monotonic() > deadline:
                raise WorkerError("a tensor-parallel rank does not listen")

        try:
            if not failed:
                self.sender.send(("close", ()), check)
                return True
        except WorkerError:
            pass
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(CLOSE_SECONDS)  # before rank 0 frees memory that they have open
        return False

    def join(self) -> None:
        """Wait for every worker to end, kill one that does not, and give the segment back."""
        deadline = time.monotonic() + CLOSE_SECONDS
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0))
            if process.is_alive():
                process.kill()
                process.join()
        if self._watcher not in (None, threading.current_thread()):  # the collector may close an engine on any thread
            self._watcher.join()
        for pipe in self.errors:
            pipe.close()
        self.sender.close()
        self.store = None  # the last reference keeps the port


def check_spawning(option: str, who: str) -> None:
    """Raise ValueError if this process cannot start others, each of which imports the main module first.

    option: the one that asks for them, with its value; who: what they are
    """
    if mp.current_process().daemon:
        raise ValueError(
            f"{option}: this process is daemonic, as those of multiprocessing.Pool are, and may not start others; those"
            " of concurrent.futures.ProcessPoolExecutor may"
        )
    with start_method_open():
        main = get_preparation_data("").get("init_main_from_path")
    if main is not None and not os.path.isfile(main):
        raise ValueError(
            f"{option}: every {who} imports the main module, and {main} is no file; save the script as a file, and run"
            " that"
        )


def hint_of(process: Any) -> str:
    """Say what may be wrong when a process has ended without a word."""
    if process.exitcode == 1:
        return '; a script that makes an LLM of several processes must do so under `if __name__ == "__main__":`'
    if process.exitcode == -signal.SIGABRT:
        return "; it aborted, as after some CUDA errors: see its last words on stderr"
    return ""
