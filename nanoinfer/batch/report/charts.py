"""Charts of a report: SVG, drawn by matplotlib with axes and units where it is installed, else by hand."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

WIDTH, HEIGHT = 720, 120  # of a chart, in pixels; matplotlib's has its axes around that height
INCH = 96  # pixels
AROUND = 80  # pixels of height that a title and an axis take
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
        """What stands above the chart."""
        return f"{self.title}: at most {_number(max(self.values))} {self.unit}"

    @property
    def labels(self) -> list[str]:
        """When each stretch begins."""
        return [f"{index * self.seconds:g} s" for index in range(len(self.values))]

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
        """What stands above the chart."""
        return f"{self.title}: {self.counts.total():,} {self.unit}"

    @property
    def bits(self) -> range:
        """The numbers of bits from the shortest length to the longest."""
        return range(min(self.counts, default=0), max(self.counts, default=-1) + 1)

    @property
    def values(self) -> list[float]:
        """How many lengths have each of these numbers of bits."""
        return [self.counts[bits] for bits in self.bits]

    @property
    def labels(self) -> list[str]:
        """The lengths that have each of these numbers of bits."""
        return [f"{1 << bits >> 1} to {(1 << bits) - 1}" for bits in self.bits]

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
    """Return the charts that have values, as HTML. The same charts give the same text."""
    charts = [chart for chart in charts if chart.values]
    if not charts:
        return ""
    try:
        return f"<figure>{_by_matplotlib(charts)}</figure>"
    except Exception:  # it is not installed, finds no place for its cache, or does not fit another package
        return "\n".join(map(_by_hand, charts))


def _by_matplotlib(charts: Sequence[Chart]) -> str:
    """Draw all charts into one SVG, so that no two names in the page are the same. Raises ImportError."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever a user's own settings are
        matplotlib.rcParams.update(STYLE)
        height = (HEIGHT + AROUND) * len(charts)
        figure = Figure(figsize=(WIDTH / INCH, height / INCH), layout="constrained")
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


def _by_hand(chart: Chart) -> str:
    """Draw a bar for each value, which shows its label and number where the mouse points."""
    labels, values = chart.labels, chart.values
    most, wide = max(values) or 1, WIDTH / len(values)
    bars = "".join(
        f'<rect x="{index * wide:.1f}" y="{HEIGHT * (1 - value / most):.1f}" width="{wide * 0.95:.1f}"'
        f' height="{HEIGHT * value / most:.1f}"><title>{label}: {_number(value)}</title></rect>'
        for index, (label, value) in enumerate(zip(labels, values, strict=True))
    )
    ends = f'<text y="{HEIGHT + 14}">{labels[0]}</text><text x="{WIDTH}" y="{HEIGHT + 14}" text-anchor="end">'
    svg = f'<svg width="{WIDTH}" height="{HEIGHT + 20}">{bars}{ends}{labels[-1]}</text></svg>'
    return f"<figure><figcaption>{chart.headline}</figcaption>{svg}</figure>"
