"""Charts of a report: what each shows in words, and SVG of them, which matplotlib draws."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

WIDTH, HEIGHT = 720, 200  # of a chart with its title and its axes, in pixels
INCH = 96  # pixels
COLOR = "#4878a8"
STYLE = {  # text stays text, and the same charts get the same names
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "figure.constrained_layout.h_pad": 0.1,
}
UNITS = ((3 * 3600, 3600, "hours"), (5 * 60, 60, "minutes"), (0, 1, "seconds"))  # from how many seconds on, its seconds


class OverTime(NamedTuple):
    """A chart of what was measured in equal stretches of a run.

    unit: of the values
    seconds: of a stretch
    """

    title: str
    unit: str
    seconds: float
    values: list[float]

    @property
    def headline(self) -> str:
        """What the chart shows, in words, which stand above it or in its place."""
        return f"{self.title}: at most {_number(max(self.values))} {self.unit}"

    def draw(self, axes: Any) -> None:
        """Draw into matplotlib's axes."""
        end = len(self.values) * self.seconds
        size, name = next((size, name) for least, size, name in UNITS if end >= least)
        edges = [index * self.seconds / size for index in range(len(self.values) + 1)]
        axes.stairs(self.values, edges, fill=True, color=COLOR)
        axes.locator_params(axis="y", nbins=4, steps=[1, 2, 5, 10])
        axes.set(xlim=(0, edges[-1]), xlabel=f"{name} since the first step")


class Histogram(NamedTuple):
    """A chart of how many lengths have each number of bits: 0, 1, 2 to 3, 4 to 7 tokens.

    unit: what has these lengths
    """

    title: str
    unit: str
    counts: Counter[int]

    @property
    def headline(self) -> str:
        """What the chart shows, in words, which stand above it or in its place."""
        least, most = 1 << self.bits.start >> 1, (1 << self.bits.stop - 1) - 1
        return f"{self.title}: {self.counts.total():,} {self.unit} of {least:,} to {most:,} tokens"

    @property
    def bits(self) -> range:
        """The numbers of bits from the shortest length to the longest."""
        return range(min(self.counts, default=0), max(self.counts, default=-1) + 1)

    @property
    def values(self) -> list[float]:
        """How many lengths have each of these numbers of bits."""
        return [self.counts[bits] for bits in self.bits]

    def draw(self, axes: Any) -> None:
        """Draw into matplotlib's axes. A tick stands at the least length of the bar on its right."""
        edges = range(len(self.bits) + 1)
        bars = axes.bar(edges[:-1], self.values, align="edge", width=1, color=COLOR, edgecolor="white")
        axes.bar_label(bars, [f"{value:,}" if value else "" for value in self.values], padding=2)
        least = [1 << bits >> 1 for bits in (*self.bits, self.bits.stop)]
        axes.set_xticks(edges, [str(length) if length < 1024 else f"{length >> 10}k" for length in least])
        axes.set(xlabel="tokens (1k = 1,024)" if least[-1] >= 1024 else "tokens")
        axes.locator_params(axis="y", nbins=4, integer=True)
        axes.margins(x=0, y=0.15)


Chart = OverTime | Histogram


def draw(charts: Sequence[Chart]) -> str:
    """Return a picture of all charts as SVG. The same charts give the same text, in which no two names are the same."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever a user's own settings are
        matplotlib.rcParams.update(STYLE)
        figure = Figure(figsize=(WIDTH / INCH, HEIGHT * len(charts) / INCH), layout="constrained")
        for axes, chart in zip(figure.subplots(len(charts), squeeze=False)[:, 0], charts, strict=True):
            chart.draw(axes)
            axes.set_title(chart.headline, loc="left", fontsize=10)
            axes.set(ylabel=chart.unit, ylim=(0, None))
            axes.yaxis.set_major_formatter(lambda value, _: _number(value))
            axes.grid(axis="y", color="#e4e4e4")
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata=dict.fromkeys(("Format", "Type", "Creator", "Date")))
    return _within_html(drawn.getvalue())


def _within_html(svg: str) -> str:
    """Return an SVG file's text without what a page of HTML does not need: the head, and the names of standards."""
    svg = svg[svg.index("<svg") :].replace("xlink:href", "href")
    for name in ('xmlns="http://www.w3.org/2000/svg"', 'xmlns:xlink="http://www.w3.org/1999/xlink"'):
        svg = svg.replace(f" {name}", "", 1)
    return svg.strip()


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
