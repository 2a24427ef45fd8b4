"""How many threads the steps of a rank take, if it is one of several, or is alone on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch

from nanoinfer.config import Config
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.runner.steps.kinds import PLAIN
from nanoinfer.runner.steps.steps import Steps
from nanoinfer.runner.threads import Threads

TIMED_ROWS = {1: 1, 16: 32}  # tokens: rows. A step of at least so many tokens takes the best threads for so many rows
TIMED_CACHE_BYTES = 2**28  # at most, for the cache of the steps that are timed

MakeSteps = Callable[[int], Steps]


def share_threads(config: Config, tp: TensorParallel) -> None:
    """Let this process take its share of the CPU's threads, if ranks of ours are beside it."""
    processes = tp.size * (1 if config.is_on_ray else config.data_parallel_size)  # Ray gives each replica cores
    if config.device == "cpu" and processes > 1 and config.starts_ranks:
        torch.set_num_threads(_share_of_threads(processes))


def choose_threads(
    threads: Threads, config: Config, tp: TensorParallel, block_bytes: int, make_steps: MakeSteps
) -> None:
    """Let one rank on the CPU compute with as many threads as make its steps faster.

    In processes that are not ours, several ranks take equally many, so that they round alike.

    block_bytes: of a block of the KV cache; make_steps: returns steps over a new cache of so many blocks
    """
    if config.device != "cpu":
        return
    if config.deterministic:  # with more threads, sums would depend on their number
        threads.fix(1)
        return
    if tp.size > 1 and not config.starts_ranks:
        threads.fix(tp.min(_share_of_threads(tp.size), config.device_of(tp.rank)))
    may_choose = tp.size == 1 and config.is_plain_cpu and torch.get_num_threads() > 1
    if may_choose and not config.description.generates:
        threads.take_all()
    elif may_choose:
        most = max(1, min(config.max_num_seqs, TIMED_CACHE_BYTES // block_bytes, max(TIMED_ROWS.values())))
        _time_steps(threads, config, most, make_steps)


def _time_steps(threads: Threads, config: Config, num_blocks: int, make_steps: MakeSteps) -> None:
    """Choose the threads of decode steps by their times; each row of a step has one block of so many."""
    length = min(config.max_model_len, *(group.block_size for group in config.cache_layout.groups))
    steps = make_steps(num_blocks)
    steps.kv_cache.zero()  # until it is written, it has no memory to read
    for table, step in zip(steps.batch.tables, steps.kv_cache.steps, strict=True):
        table[:num_blocks, 0] = torch.arange(num_blocks) * step

    def run(rows: int) -> None:
        steps.batch.positions[:rows] = length - 1
        steps.forward(rows, PLAIN, length)
        steps.draw(steps.launched(rows, rows, PLAIN))

    for tokens, rows in TIMED_ROWS.items():
        if tokens <= num_blocks:
            threads.choose(tokens, partial(run, min(rows, num_blocks)))


def _share_of_threads(ranks: int) -> int:
    """Return how many threads each of several ranks takes. Threads without a core of their own mostly wait.

    ranks: of all replicas together
    """
    return max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) // ranks))
