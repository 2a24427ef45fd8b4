"""Report: a page that shows a run, its speed, its lengths and its errors. It needs no network and no other file."""

from __future__ import annotations

import html
import os
from collections import Counter
from typing import NamedTuple

from nanoinfer.batch.lines import LineError
from nanoinfer.engine.step_result import StepResult
from nanoinfer.requests.outputs import RequestOutput

MOST_BUCKETS = 240  # of the run's time; once there are more, each takes twice the time
MOST_ERRORS = 100  # that are shown
WIDTH, HEIGHT = 720, 120  # of a chart, in pixels

PAGE = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body {{ font: 15px sans-serif; margin: 2em auto; width: 720px }} svg {{ display: block }}
figure {{ margin: 1.5em 0 }} rect {{ fill: #4878a8 }} text {{ font-size: 11px; fill: #555 }}</style></head>
<body><h1>{title}</h1><p>{summary}</p>
{body}
</body></html>
"""


class Bucket(NamedTuple):
    """The steps of a stretch of time: their number, their tokens, and the sums of their rows and shares of blocks."""

    steps: int = 0
    tokens: int = 0
    rows: int = 0
    blocks: float = 0.0

    def plus(self, other: Bucket) -> Bucket:
        """Return the bucket of both stretches."""
        return Bucket(
            self.steps + other.steps, self.tokens + other.tokens, self.rows + other.rows, self.blocks + other.blocks
        )


class Report:
    """Collects figures of a run, as many for a long one as for a short one, and writes them as a page."""

    def __init__(self, file: str) -> None:
        """file: the page's. Raises ValueError if it cannot be written."""
        try:
            os.close(os.open(file, os.O_WRONLY | os.O_CREAT, 0o666))
        except OSError as error:
            raise ValueError(f"report={file!r}: {error.strerror}") from None
        self._file = file
        self._start: float | None = None  # when the first step was done
        self._seconds = 0.1  # of a bucket
        self._buckets: list[Bucket] = []
        self._num_replicas = 1  # that have told of a step
        self._prompts: Counter[int] = Counter()  # by the number of bits of their lengths
        self._outputs: Counter[int] = Counter()
        self._errors: list[str] = []

    def step(self, result: StepResult) -> None:
        """Count a step of the engine."""
        if result.ready_at is None:
            return
        if self._start is None:
            self._start = result.ready_at
        self._num_replicas = max(self._num_replicas, result.replica + 1)
        passed = max(0.0, result.ready_at - self._start)  # of several replicas, steps come out of order
        while passed >= MOST_BUCKETS * self._seconds:
            self._seconds *= 2
            halves = [*self._buckets, Bucket()]
            self._buckets = [first.plus(second) for first, second in zip(halves[::2], halves[1::2], strict=False)]
        index = int(passed / self._seconds)
        self._buckets += [Bucket()] * (index + 1 - len(self._buckets))
        tokens = result.num_prefill_tokens + result.num_decode_tokens
        self._buckets[index] = self._buckets[index].plus(Bucket(1, tokens, result.num_running, result.blocks_used))

    def add(self, output: RequestOutput) -> None:
        """Count a result."""
        self._prompts[len(output.prompt_token_ids).bit_length()] += 1
        self._outputs.update(len(sample.token_ids).bit_length() for sample in output.samples)

    def fail(self, error: LineError) -> None:
        """Count an error."""
        if len(self._errors) < MOST_ERRORS:
            self._errors.append(str(error))

    def write(self, title: str, summary: str) -> None:
        """Write the page. Raises OSError."""
        text = PAGE.format(title=html.escape(title), summary=html.escape(summary), body=self._body())
        try:  # a file's name may hold bytes that its locale does not know, for which Python has half characters
            with open(self._file, "w", encoding="utf-8", errors="backslashreplace") as page:
                page.write(text)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._file) from None

    def _body(self) -> str:
        seconds = [f"{index * self._seconds:g} s" for index in range(len(self._buckets))]
        means = [bucket._replace(steps=max(bucket.steps, 1)) for bucket in self._buckets]
        parts = [
            _chart("Tokens per second, of prompts and outputs", seconds, [b.tokens / self._seconds for b in means]),
            _chart("Running rows", seconds, [self._num_replicas * bucket.rows / bucket.steps for bucket in means]),
            _chart("KV-cache blocks in use, %", seconds, [100 * bucket.blocks / bucket.steps for bucket in means]),
            _histogram("Prompts by their tokens", self._prompts),
            _histogram("Samples by their tokens", self._outputs),
        ]
        if self._errors:
            items = "\n".join(f"<li>{html.escape(error)}</li>" for error in self._errors)
            parts.append(f"<h2>The first errors</h2>\n<ul>\n{items}\n</ul>")
        return "\n".join(parts)


def _histogram(title: str, counts: Counter[int]) -> str:
    """Draw how many lengths have each number of bits: 0, 1, 2 to 3, 4 to 7 tokens."""
    bits = range(min(counts, default=0), max(counts, default=0) + 1)
    return _chart(title, [f"{1 << n >> 1} to {(1 << n) - 1}" for n in bits], [counts[n] for n in bits])


def _chart(title: str, labels: list[str], values: list[float]) -> str:
    """Draw a bar for each value, which shows its label and number where the mouse points."""
    if not values:
        return ""
    most, wide = max(values) or 1, WIDTH / len(values)
    bars = "".join(
        f'<rect x="{index * wide:.1f}" y="{HEIGHT * (1 - value / most):.1f}" width="{wide * 0.95:.1f}"'
        f' height="{HEIGHT * value / most:.1f}"><title>{label}: {value:,.4g}</title></rect>'
        for index, (label, value) in enumerate(zip(labels, values, strict=True))
    )
    ends = f'<text y="{HEIGHT + 14}">{labels[0]}</text><text x="{WIDTH}" y="{HEIGHT + 14}" text-anchor="end">'
    svg = f'<svg width="{WIDTH}" height="{HEIGHT + 20}">{bars}{ends}{labels[-1]}</text></svg>'
    return f"<figure><figcaption>{title}; the tallest: {most:,.4g}</figcaption>{svg}</figure>"
