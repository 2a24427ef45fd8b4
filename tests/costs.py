"""What tests cost in CPU seconds, those of the processes that they start included: `--most-cpu` bounds a plain test.

Wall time depends on what else runs, so that no bound can hold it; --durations prints it.
"""

from __future__ import annotations

import os
from collections.abc import Generator
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
}
TICKS = os.sysconf("SC_CLK_TCK")  # of the kernel's clock in a second
NAME = "CPU seconds"  # of a report's property


def cpu_seconds() -> float:
    """Return what this process and those below it have computed, and those that ended and were waited for."""
    parents, ticks = dict[int, int](), dict[int, int]()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        parents[int(folder.name)], ticks[int(folder.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    return sum(ticks[pid] for pid in ticks if is_below(pid, parents)) / TICKS


def is_below(pid: int, parents: dict[int, int]) -> bool:
    """Whether a process is this one, or was started by it or by one below it."""
    while pid not in (0, os.getpid()):
        pid = parents.get(pid, 0)
    return pid != 0


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
