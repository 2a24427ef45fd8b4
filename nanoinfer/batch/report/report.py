"""RunReport: collects what a page shows of a run: its speed, its lengths, its first results and its errors."""

from __future__ import annotations

import os
from collections import Counter
from typing import NamedTuple

from nanoinfer.batch.lines.errors import Errors
from nanoinfer.batch.lines.requests import Line
from nanoinfer.batch.report.charts import Chart, Histogram, OverTime
from nanoinfer.batch.report.page import Result, make_page
from nanoinfer.engine.results.step_result import StepResult
from nanoinfer.requests.outputs import RequestOutput

MOST_BINS = 240  # of the run's time; once there are more, each takes twice the time
MOST_RESULTS = 10  # that are shown
MOST_OF_ID, MOST_OF_PROMPT, MOST_OF_TEXT = 60, 120, 300  # characters of a result's texts that are shown


class TimeBin(NamedTuple):
    """The steps of a stretch of time: their number, their tokens, and the sums of their rows and shares of blocks."""

    steps: int = 0
    tokens: int = 0
    rows: int = 0
    blocks: float = 0.0

    def plus(self, other: TimeBin) -> TimeBin:
        """Return the bin of both stretches."""
        return TimeBin(
            self.steps + other.steps, self.tokens + other.tokens, self.rows + other.rows, self.blocks + other.blocks
        )


class RunReport:
    """Collects figures of a run, as many for a long one as for a short one, and writes them as a page."""

    def __init__(self, file: str) -> None:
        """file: the page's. Raises ValueError if it cannot be written."""
        try:
            os.close(os.open(file, os.O_WRONLY | os.O_CREAT, 0o666))
        except OSError as error:
            raise ValueError(f"report={file!r}: {error.strerror}") from None
        self._file = file
        self._start: float | None = None  # when the first step was done
        self._seconds = 0.1  # of a bin
        self._bins: list[TimeBin] = []
        self._num_replicas = 1  # that have told of a step
        self._prompts: Counter[int] = Counter()  # by the number of bits of their lengths
        self._outputs: Counter[int] = Counter()
        self._results: list[Result] = []

    def step(self, result: StepResult) -> None:
        """Count a step of the engine."""
        if result.ready_at is None:
            return
        tokens = result.num_prefill_tokens + result.num_decode_tokens
        if self._start is None:
            self._start, tokens = result.ready_at, 0  # the step took its time before the start
        self._num_replicas = max(self._num_replicas, result.replica + 1)
        passed = max(0.0, result.ready_at - self._start)  # of several replicas, steps come out of order
        while passed >= MOST_BINS * self._seconds:
            self._seconds *= 2
            self._bins = _halved(self._bins)
        index = int(passed / self._seconds)
        self._bins += [TimeBin()] * (index + 1 - len(self._bins))
        self._bins[index] = self._bins[index].plus(TimeBin(1, tokens, result.num_running, result.blocks_used))

    def add(self, line: Line, output: RequestOutput) -> None:
        """Count a result."""
        self._prompts[len(output.prompt_token_ids).bit_length()] += 1
        self._outputs.update(len(sample.token_ids).bit_length() for sample in output.samples)
        if len(self._results) < MOST_RESULTS:
            self._results.append(_shown(line, output))

    def write(self, title: str, summary: str, errors: Errors) -> None:
        """Write the page. Raises OSError."""
        text = make_page(title, summary, self.charts(), self._results, errors)
        try:
            with open(self._file, "w", encoding="utf-8") as page:
                page.write(text)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._file) from None

    def charts(self) -> list[Chart]:
        """Return a chart of each thing that was counted."""
        bins, seconds = self._bins, self._seconds
        while len(bins) > 1 and sum(one.steps for one in bins) < 2 * len(bins):
            bins, seconds = _halved(bins), 2 * seconds  # else the engine looks idle between long steps
        means = [one._replace(steps=max(one.steps, 1)) for one in bins]
        rates = [one.tokens / seconds for one in means]
        rows = [self._num_replicas * one.rows / one.steps for one in means]
        blocks = [100 * one.blocks / one.steps for one in means]
        charts: list[Chart] = [
            OverTime("Tokens per second, of prompts and outputs", "tokens/s", seconds, rates),
            OverTime("Running rows", "rows", seconds, rows),
            OverTime("KV-cache blocks in use", "%", seconds, blocks),
            Histogram("Prompts by their tokens", "prompts", self._prompts),
            Histogram("Samples by their tokens", "samples", self._outputs),
        ]
        return [chart for chart in charts if chart.values]


def _halved(bins: list[TimeBin]) -> list[TimeBin]:
    """Return half as many bins, of twice the time."""
    pairs = [*bins, TimeBin()]
    return [first.plus(second) for first, second in zip(pairs[::2], pairs[1::2], strict=False)]


def _shown(line: Line, output: RequestOutput) -> Result:
    assert output.finish_reason is not None
    return Result(
        _beginning(str(line.id), MOST_OF_ID),
        _beginning(output.prompt or str(output.prompt_token_ids), MOST_OF_PROMPT),
        _beginning(output.text or str(output.token_ids), MOST_OF_TEXT),
        len(output.token_ids),
        output.finish_reason,
    )


def _beginning(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."
