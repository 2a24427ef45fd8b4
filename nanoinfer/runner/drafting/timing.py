"""How long decode steps take, by their sizes: plain ones, and those that verify guesses."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from nanoinfer.config import Config
from nanoinfer.runner.drafting.sizes import VerifySize
from nanoinfer.runner.steps.steps import Steps

RUNS = 2  # of each size; the faster one counts
CPU_ROWS = 1, 4, 16  # whose steps are timed on the CPU
STREAMED_ROWS = 1, 32  # likewise on a GPU, where steps take as long as layers from host memory
CPU_SECONDS = 0.3  # behind so many, only what estimates need is timed on the CPU, once
LENGTH = 64  # tokens of each row's text: some repeat, so that a drafter has all guesses


def time_steps(
    config: Config,
    steps: Steps,
    sizes: list[VerifySize],
    run: Callable[[int, int], object],
    agree: Callable[[float], float],
) -> dict[VerifySize, float]:
    """Return the seconds of a step of each size, and of plain steps of as many rows, whose size has 0 guesses.

    On the CPU some of the smaller sizes suffice, and where layers come from host memory some of all. Among them are a
    step of one token, and the largest of one row. The rows have texts of random tokens, so that experts are chosen as
    usual. They are empty again behind it.

    sizes: of verifying steps; run: runs a step of so many rows and guesses
    agree: returns what the ranks agree on, of each rank's own seconds
    """
    some = CPU_ROWS if config.device == "cpu" else (*STREAMED_ROWS, max(sizes, default=(0, 0))[0])
    is_short = config.device == "cuda" and not config.weight_offload_gib
    timed = [size for size in sizes if is_short or size[0] in some]
    rows = {size[0] for size in timed}
    trial = TrialRows(config, steps, max(rows, default=0))
    seconds: dict[VerifySize, float] = {}
    needed = {(1, 0), max((size for size in timed if size[0] == 1), default=(1, 0))}
    for size in sorted({*timed, *((count, 0) for count in rows)}):
        is_soon = config.device == "cuda" or RUNS * sum(seconds.values()) < CPU_SECONDS
        if is_soon or size in needed:
            seconds[size] = agree(min(_seconds(trial, run, size) for _ in range(RUNS if is_soon else 1)))
    trial.clear()
    return seconds


def _seconds(trial: TrialRows, run: Callable[[int, int], object], size: VerifySize) -> float:
    trial.fill(size[0])
    synchronize = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    synchronize()
    start = time.perf_counter()
    run(*size)
    synchronize()
    return time.perf_counter() - start


class TrialRows:
    """Rows of a batch that no sequence has, with texts that repeat. All write to one block of each group of layers."""

    def __init__(self, config: Config, steps: Steps, rows: int) -> None:
        """rows: at most so many are filled"""
        assert steps.verifier is not None
        self._batch, self._texts, self._rows = steps.batch, steps.verifier.texts, steps.verifier.rows
        self._end, self._most = config.max_model_len, config.max_guesses
        length = max(1, min(LENGTH, self._end - self._most - 2))
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(config.description.vocab_size, (rows, -(-length // 2)), generator=generator)
        self._tokens = tokens.repeat(1, 2)[:, :length].int().to(self._batch.device)

    def fill(self, rows: int) -> None:
        """Fill the first rows, and empty the others."""
        self.clear()
        length, batch, drafting = self._tokens.shape[1], self._batch, self._rows
        self._texts.tokens[:rows, :length] = self._tokens[:rows]
        batch.last_tokens[:rows] = self._tokens[:rows, -1]
        batch.positions[:rows] = length - 1
        drafting.texts[:rows] = torch.arange(rows, device=batch.device)
        drafting.ends[:rows], drafting.limits[:rows] = self._end, self._most

    def clear(self) -> None:
        """Empty all rows."""
        self._batch.table.empty()
