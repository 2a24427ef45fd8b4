"""Draw docs/speed.svg, and write the tables of docs/speed.md, from docs/figures.json.

    python docs/make_speed.py
    python docs/make_speed.py SETUP run.json ...    # first add runs of bench.py --json

A run's "arguments" are those of `python bench.py --config`. Its "setup" names the system, commit, date, machine and
versions. Runs of nanoinfer have figures of `bench.py --json`, under the same names; other systems' have only a rate.

Of runs with the same arguments the last one counts, and beside it those of other systems on the same machine. "shown"
lists the arguments that the page has, in its order. The page has all of "others", and nothing of "archive".
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nanoinfer.benchmark.output.status_line import StatusLine

DOCS = Path(__file__).parent
OURS = "nanoinfer"
SYSTEMS = {OURS: "#1f6feb", "vLLM": "#9aa4b2", "nano-vLLM": "#c9d1d9"}  # and their colours
DARK = "#24292f"
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
        self.shown: list[str] = content["shown"]
        self.runs: list[dict[str, Any]] = content["runs"]
        self.others: list[dict[str, Any]] = content["others"]
        self.archive: list[dict[str, Any]] = content["archive"]

    @classmethod
    def read(cls) -> Figures:
        """The content of docs/figures.json."""
        return cls(json.loads((DOCS / "figures.json").read_text("utf-8")))

    def text(self) -> str:
        """Write the content of figures.json: a line for each entry."""
        setups = [f"{json.dumps(name)}: {json.dumps(setup)}" for name, setup in self.setups.items()]
        lists: dict[str, list[Any]] = {
            "shown": self.shown,
            "runs": self.runs,
            "others": self.others,
            "archive": self.archive,
        }
        parts = [_block('"setups": {', setups, "}")]
        for name, entries in lists.items():
            parts.append(_block(f'"{name}": [', map(json.dumps, entries), "]"))
        return "{\n" + ",\n".join(parts) + "\n}\n"

    def add(self, setup: str, result: dict[str, Any]) -> None:
        """Add a run, as bench.py --json wrote it. Raises ValueError if there is no such setup, or no --config."""
        if setup not in self.setups:
            raise ValueError(f"setup {setup!r}: figures.json has {', '.join(map(repr, self.setups))}; add it there")
        command = re.sub(r"--(json|plot|repeats)[ =]\S+", "", result["command"])
        config = re.search(r"--config[ =](\S+)", command)
        if config is None:
            raise ValueError(f"command {result['command']!r}: must have --config, whose model anyone can run")
        arguments = " ".join([config[1], *command.replace(config[0], "").split()])
        rounded = {name: round(result[name], 2) for name in ("seconds", "floor_seconds", "fraction_of_floor")}
        rate = {"tokens_per_second": round(result["tokens_per_second"])}
        self.runs.append({"arguments": arguments, "setup": setup, **rate, **rounded, "repeats": len(result["repeats"])})

    def setup(self, entry: dict[str, Any]) -> dict[str, str]:
        """Return the system, commit, date, machine and versions of a run or another figure."""
        return self.setups[entry["setup"]]

    def by_system(self, arguments: str) -> dict[str, dict[str, Any]]:
        """Return nanoinfer's last run with these arguments, and the other systems' last on the same machine."""
        runs = [run for run in self.runs if run["arguments"] == arguments]
        machines = [self.setup(run)["machine"] for run in runs if self.setup(run)["system"] == OURS]
        if not machines:
            raise ValueError(f"arguments {arguments!r}: figures.json has no run of {OURS} with them; add one")
        return {self.setup(run)["system"]: run for run in runs if self.setup(run)["machine"] == machines[-1]}

    def tables(self) -> dict[str, str]:
        """Make every table of docs/speed.md, by the name that its markers have."""
        shown = {arguments: self.by_system(arguments) for arguments in self.shown}
        compared = {arguments: runs for arguments, runs in shown.items() if len(runs) > 1}
        systems = [system for system in SYSTEMS if any(system in runs for runs in compared.values())]
        used = {entry["setup"] for entry in (*self.others, *(run for runs in shown.values() for run in runs.values()))}
        titles = "`python bench.py --config ...`", "tok/s", "seconds", "floor", "of the floor", "runs", "GPUs", "commit"
        return {
            "runs": _table(titles, (self._row(runs[OURS]) for runs in shown.values())),
            "systems": _table(
                ("tok/s", *systems), ((_code(name), *_rates(runs, systems)) for name, runs in compared.items())
            ),
            "others": _table(("measured", "figure", "command", "commit"), map(self._other, self.others)),
            "setups": _table(
                ("system", "commit or release", "date", "machine", "versions"),
                dict.fromkeys(tuple(setup.values()) for name, setup in self.setups.items() if name in used),
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

    def _other(self, other: dict[str, Any]) -> tuple[str, ...]:
        return other["what"], other["figure"], _code(other["command"]), self.setup(other)["commit"]

    def draw(self, file: Path) -> None:
        """Draw `picture` into an SVG file. The same figures make the same bytes."""
        import matplotlib

        # Text stays text: a test can read it, and the file stays small.
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": OURS, "font.size": 10}):
            self.picture().savefig(file, metadata={"Date": None, "Creator": None})

    def picture(self) -> Any:
        """Return matplotlib's Figure of the compared systems and the floor, with a panel for each run."""
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine

        figure = Figure(figsize=(9, 4.4), layout=ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.08), facecolor="white")
        for axes, (arguments, title) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
            self._draw_panel(axes, arguments, title)
        machines = dict.fromkeys(self.setup(self.by_system(arguments)[OURS])["machine"] for arguments in PANELS)
        figure.suptitle(
            f"Generated tokens per second on {' and '.join(machines)}; dashed: the most that the machine allows"
        )
        return figure

    def _draw_panel(self, axes: Any, arguments: str, title: str) -> None:
        runs = self.by_system(arguments)
        names = [name for name in SYSTEMS if name in runs]
        labels = [f"{name} {self.setup(runs[name])['commit'].removeprefix('release ')}" for name in names]
        rates = [runs[name]["tokens_per_second"] for name in names]
        axes.barh(labels, rates, color=[SYSTEMS[name] for name in names])
        most = runs[OURS]["tokens_per_second"] / runs[OURS]["fraction_of_floor"]
        for row, (name, rate) in enumerate(zip(names, rates, strict=True)):
            inside = rate > 0.3 * most  # there a label fits, and stays clear of the dashed line
            place: dict[str, Any] = {"xytext": (-5 if inside else 4, 0), "ha": "right" if inside else "left"}
            color = "white" if inside and name == OURS else DARK
            axes.annotate(f"{rate:,.0f}", (rate, row), textcoords="offset points", va="center", color=color, **place)
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


def _rates(runs: dict[str, dict[str, Any]], systems: list[str]) -> Iterable[str]:
    return (f"{runs[system]['tokens_per_second']:,.0f}" if system in runs else "" for system in systems)


def _table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [titles, ("---",) * len(titles), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _block(begin: str, lines: Iterable[str], end: str) -> str:
    return f"  {begin}\n" + ",\n".join(f"    {line}" for line in lines) + f"\n  {end}"


def _code(text: str) -> str:
    return f"`{text}`"


def main() -> None:
    """Add runs to docs/figures.json, if the command line has some; write docs/speed.md and docs/speed.svg."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("setup", nargs="?", help="the name in figures.json of the system that ran")
    parser.add_argument("files", nargs="*", metavar="run.json", help="files of bench.py --json")
    args = parser.parse_args()
    figures = Figures.read()
    for file in args.files:
        figures.add(args.setup, json.loads(Path(file).read_text("utf-8")))
    with StatusLine() as status:
        status.begin(f"writing {len(figures.runs)} runs into docs/figures.json")
        (DOCS / "figures.json").write_text(figures.text(), "utf-8")
        page, tables = DOCS / "speed.md", figures.tables()
        status.begin(f"writing the tables {', '.join(tables)} into docs/speed.md")
        page.write_text(fill(page.read_text("utf-8"), tables), "utf-8")
        status.begin("drawing docs/speed.svg")
        figures.draw(DOCS / "speed.svg")


if __name__ == "__main__":
    main()
