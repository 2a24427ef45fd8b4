"""What tests cost in CPU seconds, those of the processes that they start included: `--most-cpu` bounds a plain test.

Wall time depends on what else runs, so that no bound can hold it; --durations prints it.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from forking import wait_for_server

EXCUSED = {  # beginnings of ids of tests that may cost more, and why; at most ten
    "tests/test_compiles.py": "the first of a worker starts a process that compiles",
    "tests/test_compiling.py": "a process of its own imports torch and compiles",
    "tests/test_decoder_row.py::test_programs_side_by_side": "programs are processes that interpret a decoder",
    "tests/test_ray_data.py::TestCluster": "the first of a worker starts a cluster",
    "tests/test_ray_replicas.py::TestCluster": "a cluster starts, and actors import for seconds",
    "tests/test_spmd.py": "processes of a trainer import for seconds",
    "tests/test_start.py": "processes of their own import for seconds",
    "tests/test_tensor_parallel.py::TestTwoRanks": "scripts start ranks, which import for seconds",
    "tests/test_vllm_clients.py::test_trl": "a process of its own imports TRL and a trainer for seconds",
}
TICKS = os.sysconf("SC_CLK_TCK")  # of the kernel's clock in a second
NAME = "CPU seconds"  # of a report's property


def cpu_seconds() -> float:
    """Return what this process and those below it have computed, and those that ended and were waited for."""
    return sum(map(ticks_of, below(os.getpid()))) / TICKS


def below(pid: int) -> Iterator[int]:
    """Yield a process and those that it started, or one below it: each of its threads has started some."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # it has ended
            for child in children.read_text().split():
                yield from below(int(child))


def ticks_of(pid: int) -> int:
    with suppress(OSError):
        return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return 0


class Costs:
    """Counts what each test costs, and lets the run fail if a plain one costs more than `most` seconds."""

    def __init__(self, most: float) -> None:
        self.most = most
        self.before = 0.0
        self.seconds: dict[str, float] = {}  # of each plain test

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            wait_for_server()  # its imports are no test's

    def pytest_runtestloop(self) -> None:
        self.before = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.when == "teardown":
            before, self.before = self.before, cpu_seconds()
            report.user_properties.append((NAME, self.before - before))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = dict(report.user_properties).get(NAME)
        if isinstance(seconds, float) and "whole" not in report.keywords:
            self.seconds[report.nodeid] = seconds

    def over(self) -> dict[str, float]:
        """Return the plain tests that cost too much."""
        return {
            name: seconds
            for name, seconds in self.seconds.items()
            if seconds > self.most and not name.startswith(tuple(EXCUSED))
        }

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.over():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("dearest plain tests, in CPU seconds")
        for name in sorted(self.seconds, key=self.seconds.__getitem__, reverse=True)[:10]:
            terminalreporter.write_line(f"{self.seconds[name]:5.1f} {name}")
        for name, seconds in self.over().items():
            terminalreporter.write_line(f"FAILED {name}: {seconds:.1f} s of CPU time, at most {self.most:g}", red=True)
