"""Draw docs/speed.svg, and write the tables of docs/speed.md, from docs/figures.json.

    python -m nanoinfer.benchmark.figures

A run's "arguments" are those of `python bench.py --config`. Its "setup" names the system, commit, date, machine and
versions. Runs of nanoinfer have figures of `bench.py --json`, under the same names; other systems' have only a rate.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
OURS = "nanoinfer"
SYSTEMS = {OURS: "#1f6feb", "vLLM": "#9aa4b2", "nano-vLLM": "#c9d1d9"}  # and their colours
PANELS = {
    "0.6b": "Qwen3-0.6B, 256 requests",
    "8b": "Qwen3-8B, 256 requests",
    "0.6b --workload stream": "Qwen3-0.6B, one request",
    "8b --workload stream": "Qwen3-8B, one request",
}  # the runs that are drawn


class Figures:
    """The content of figures.json."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.setups: dict[str, dict[str, str]] = content["setups"]
        self.runs: list[dict[str, Any]] = content["runs"]
        self.others: list[dict[str, Any]] = content["others"]

    @classmethod
    def read(cls) -> Figures:
        """The content of docs/figures.json."""
        return cls(json.loads((DOCS / "figures.json").read_text("utf-8")))

    def setup(self, entry: dict[str, Any]) -> dict[str, str]:
        """Return the system, commit, date, machine and versions of a run or another figure."""
        return self.setups[entry["setup"]]

    def by_system(self, arguments: str) -> dict[str, dict[str, Any]]:
        """Return the systems' runs with these arguments, by system."""
        return {self.setup(run)["system"]: run for run in self.runs if run["arguments"] == arguments}

    def tables(self) -> dict[str, str]:
        """Make every table of docs/speed.md, by the name that its markers have."""
        ours = [run for run in self.runs if self.setup(run)["system"] == OURS]
        compared = [run["arguments"] for run in ours if len(self.by_system(run["arguments"])) > 1]
        titles = "`python bench.py --config ...`", "tok/s", "seconds", "floor", "of the floor", "runs", "GPUs", "commit"
        return {
            "runs": _table(titles, map(self._row, ours)),
            "systems": _table(("tok/s", *SYSTEMS), map(self._comparison, compared)),
            "others": _table(("measured", "figure", "command", "commit"), map(self._other, self.others)),
            "setups": _table(
                ("system", "commit or release", "date", "machine", "versions"),
                dict.fromkeys(tuple(setup.values()) for setup in self.setups.values()),
            ),
        }

    def _row(self, run: dict[str, Any]) -> tuple[str, ...]:
        return (
            _code(run["arguments"]),
            f"{run['tokens_per_second']:,.0f}",
            f"{run['seconds']:.2f}",
            f"{run['floor_seconds']:.2f}",
            f"{run['fraction_of_floor']:.0%}",
            str(run["repeats"]),
            self.setup(run)["machine"].split()[0],
            self.setup(run)["commit"],
        )

    def _comparison(self, arguments: str) -> tuple[str, ...]:
        runs = self.by_system(arguments)
        rates = (f"{runs[system]['tokens_per_second']:,.0f}" if system in runs else "" for system in SYSTEMS)
        return _code(arguments), *rates

    def _other(self, other: dict[str, Any]) -> tuple[str, ...]:
        return other["what"], other["figure"], _code(other["command"]), self.setup(other)["commit"]

    def draw(self, file: Path) -> None:
        """Draw the compared systems and the floor, a panel for each run. The same figures make the same bytes."""
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine

        # Text stays text: a test can read it, and the file stays small.
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": OURS, "font.size": 10}):
            figure = Figure(figsize=(9, 4.4), layout=ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.08), facecolor="white")
            for axes, (arguments, title) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
                self._draw_panel(axes, arguments, title)
            figure.suptitle("Generated tokens per second on one NVIDIA H200; dashed: the most that the machine allows")
            figure.savefig(file, metadata={"Date": None, "Creator": None})

    def _draw_panel(self, axes: Any, arguments: str, title: str) -> None:
        runs = self.by_system(arguments)
        names = [name for name in SYSTEMS if name in runs]
        labels = [f"{name} {self.setup(runs[name])['commit'].removeprefix('release ')}" for name in names]
        rates = [runs[name]["tokens_per_second"] for name in names]
        bars = axes.barh(labels, rates, color=[SYSTEMS[name] for name in names])
        axes.bar_label(bars, [f"{rate:,.0f}" for rate in rates], padding=4)
        most = runs[OURS]["tokens_per_second"] / runs[OURS]["fraction_of_floor"]
        axes.axvline(most, color="#57606a", linestyle="--", linewidth=1)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set(xlim=(0, 1.05 * most), xticks=[])
        axes.invert_yaxis()
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.tick_params(left=False)


def fill(page: str, tables: dict[str, str]) -> str:
    """Put each table between its markers, <!-- figures: NAME --> and <!-- end -->; returns the new page."""
    for name, table in tables.items():
        begin, end = f"<!-- figures: {name} -->", "<!-- end -->"
        if page.count(begin) != 1:
            raise ValueError(f"the page has {page.count(begin)} places for the table {name!r}: must be 1")
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}"
    return page


def _table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [titles, ("---",) * len(titles), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _code(text: str) -> str:
    return f"`{text}`"


def main() -> None:
    """Write docs/speed.md and docs/speed.svg."""
    figures = Figures.read()
    page = DOCS / "speed.md"
    page.write_text(fill(page.read_text("utf-8"), figures.tables()), "utf-8")
    figures.draw(DOCS / "speed.svg")


if __name__ == "__main__":
    main()
