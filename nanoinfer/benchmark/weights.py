"""How long weights take to change, and memory to go away and come back: bench.py --weights."""

from __future__ import annotations

import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from safetensors.torch import save_file
from torch import Tensor

from nanoinfer.benchmark.output.status_line import StatusLine
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.llm import LLM

MOST_ON_DISK = 32 << 30  # bytes; larger checkpoints take minutes to write
PAUSE_SECONDS = 1.0  # of sleep, in which a GPU's driver clears the memory; nobody gets it sooner
Shapes = list[tuple[str, tuple[int, ...], torch.dtype]]


@dataclass
class Row:
    """Something that was timed.

    num_bytes: of the weights that it reads, over all ranks; 0: it moves none
    """

    what: str
    num_bytes: int
    seconds: list[float]

    def __str__(self) -> str:
        median = statistics.median(self.seconds)
        runs = ", ".join(f"{1e3 * seconds:,.1f}" for seconds in self.seconds)
        rate = f", {self.num_bytes / median / 1e9:,.0f} GB/s" if self.num_bytes else ""
        return f"{self.what}: {1e3 * median:,.1f} ms{rate} (runs: {runs})"


def time_weights(llm: LLM, repeats: int, status: StatusLine) -> Iterator[Row]:
    """Yield a row for each level of sleep, and for each way to change the weights, as it has been timed.

    The KV cache sleeps while weights change: so a GPU has room for the new ones too.
    """
    device = torch.device(llm.config.device)
    shapes = shapes_of(llm)
    num_bytes = sum(math.prod(shape) * dtype.itemsize for _, shape, dtype in shapes)
    for level in (1, 2):
        status.begin(f"timing sleep, level {level}")
        yield from _time_sleep(llm, level, repeats, device, num_bytes)
    llm.sleep(level=2)
    llm.wake_up(["weights"])

    def updates(what: str, tensors: dict[str, Tensor]) -> Row:
        llm.update_weights(tensors)
        runs = [_seconds(lambda: llm.update_weights(tensors), device) for _ in range(repeats)]
        return Row(f"update_weights, {len(tensors):,} tensors of {what}", num_bytes, runs)

    status.begin("timing update_weights")
    tensors = make_tensors(shapes, device)
    yield updates("this process", tensors)
    if num_bytes <= MOST_ON_DISK:
        status.begin("timing load_weights; first a checkpoint is written")
        with saved(tensors) as folder:
            llm.load_weights(folder)  # fills the page cache
            runs = [_seconds(lambda: llm.load_weights(folder), device) for _ in range(repeats)]
            yield Row("load_weights from the page cache", num_bytes, runs)
    if device.type == "cuda":
        status.begin("timing update_weights from another process")
        tensors.clear()
        torch.cuda.empty_cache()
        with of_another_process(shapes) as theirs:
            yield updates("another process", theirs)
            theirs.clear()


def _time_sleep(llm: LLM, level: int, repeats: int, device: torch.device, num_bytes: int) -> Iterator[Row]:
    """Time sleep and wake_up, the first time and later."""
    moved = num_bytes if level == 1 else 0
    times = []
    for _ in range(repeats + 1):
        asleep = _seconds(lambda: llm.sleep(level), device)
        time.sleep(PAUSE_SECONDS)
        times.append((asleep, _seconds(llm.wake_up, device)))
    for when, some in (("the first time", times[:1]), ("later", times[1:])):
        sleeps, wakes = zip(*some, strict=True)
        yield Row(f"sleep, level {level}, {when}", moved, list(sleeps))
        yield Row(f"wake_up, level {level}, {when}", moved, list(wakes))


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Time a call, and what it has left to the device."""
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def shapes_of(llm: LLM) -> Shapes:
    """Return the names and shapes of the tensors that a checkpoint of the model has, one for each expert if it may."""
    assert isinstance(llm.engine, LLMEngine)
    table = llm.engine.ranks.runner.holdings.weights.table
    return [
        (name, shards[0].stored_shape, llm.config.torch_dtype)
        for name, shards in table.items()
        if not shards[0].replaces and not shards[0].optional
    ]


def make_tensors(shapes: Shapes, device: torch.device) -> dict[str, Tensor]:
    """Make tensors of random numbers."""
    return {name: torch.empty(shape, dtype=dtype, device=device).normal_(0, 0.02) for name, shape, dtype in shapes}


@contextmanager
def saved(tensors: dict[str, Tensor]) -> Iterator[str]:
    """Save a checkpoint for the block."""
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    with tempfile.TemporaryDirectory() as folder:
        if shutil.disk_usage(folder).free < 1.1 * num_bytes:
            raise SystemExit(f"bench.py: error: {folder} has no room for {num_bytes / 2**30:,.1f} GiB of weights")
        save_file({name: tensor.cpu() for name, tensor in tensors.items()}, Path(folder) / "model.safetensors")
        yield folder


@contextmanager
def of_another_process(shapes: Shapes) -> Iterator[dict[str, Tensor]]:
    """Let another process make tensors on the GPU; CUDA's interprocess memory handles bring them here."""
    context = mp.get_context("spawn")
    queue, done = context.Queue(), context.Event()
    process = context.Process(target=_hold_tensors, args=(shapes, queue, done), daemon=True)
    process.start()
    try:
        yield queue.get(timeout=120)
    finally:
        done.set()
        process.join()


def _hold_tensors(shapes: Shapes, queue: Any, done: Any) -> None:
    queue.put(make_tensors(shapes, torch.device("cuda", 0)))
    done.wait()
