"""Processes that run tests side by side: how many, what each has of a GPU's memory, and which tests run alone."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Generator
from pathlib import Path
from weakref import WeakSet

import pytest
import torch

from nanoinfer.runner.memory.region import Region

BESIDE_OTHERS = "PYTEST_XDIST_WORKER" in os.environ  # other tests take cores, and memory of the same GPU
GPU_BYTES = 5 << 30  # of a worker, at least
CONTEXT_BYTES = 1 << 30  # of these: what CUDA takes for a process
CACHED_BYTES = 1 << 30  # that torch may keep from one test to the next


def count_workers() -> int:
    """Return how many processes run all tests."""
    cores = len(os.sched_getaffinity(0))
    if torch.cuda.is_available():
        return min(cores, torch.cuda.mem_get_info()[0] // GPU_BYTES)
    return min(cores, 7) + 1  # some tests wait, others compute


def patience(item: pytest.Item) -> float:
    """Return a test's own limit in seconds. The patient begin first, lest one process wait for them at the end."""
    mark = item.get_closest_marker("timeout")
    return mark.args[0] if mark else 0


class Worker:
    """One of several processes. Tests with the mark `alone` come last, see the whole GPU, and nothing runs beside them.

    Others see a share of the GPU's memory: an LLM takes most of what it sees.
    """

    def __init__(self) -> None:
        self.file = Path(tempfile.gettempdir()) / f"tests-{os.environ['PYTEST_XDIST_TESTRUNUID']}.lock"
        self.count = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        self.is_alone = False
        if torch.cuda.is_available():
            self.share_gpu()

    def share_gpu(self) -> None:
        """Let torch tell of a share of the device's memory, and of what this process holds of it."""
        read, init, regions = torch.cuda.mem_get_info, Region.__init__, WeakSet[Region]()

        def init_and_note(region: Region, device: torch.device, most: int) -> None:
            init(region, device, most)
            regions.add(region)

        def read_share(device: torch.device | int | None = None) -> tuple[int, int]:
            free, total = read(device)
            if self.is_alone:
                return free, total
            share = total // self.count - CONTEXT_BYTES
            held = torch.cuda.memory_reserved(device) + sum(region.num_bytes for region in regions)
            return max(0, min(free, share - held)), share

        Region.__init__, torch.cuda.mem_get_info = init_and_note, read_share

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: ("alone" in item.keywords, -patience(item)))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Wait for the turn of a test before its timeout begins to run."""
        self.is_alone = "alone" in item.keywords
        with self.file.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX if self.is_alone else fcntl.LOCK_SH)
            result = yield
            if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > CACHED_BYTES:
                torch.cuda.empty_cache()  # the others need it
            return result
