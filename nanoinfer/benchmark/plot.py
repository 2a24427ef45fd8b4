"""The picture of bench.py --plot."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from nanoinfer.benchmark.repeats import Repeat
from nanoinfer.engine.step_result import StepResult


def check_plot(file: str) -> None:
    """Raise ValueError if matplotlib is missing, or does not write files of this suffix."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(f"--plot {file} needs matplotlib: pip install matplotlib") from None
    known = Figure().canvas.get_supported_filetypes()
    if (suffix := Path(file).suffix[1:].lower()) not in known:
        raise ValueError(f"--plot {file}: matplotlib does not write {suffix!r} files, only {', '.join(sorted(known))}")


def plot(repeat: Repeat, title: str, file: str) -> None:
    """Draw tokens per second over the repeat's time into `file`, and each replica's running rows and used blocks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    rates, rows, blocks = figure.subplots(3, sharex=True)
    steps = sorted(repeat.steps, key=lambda step: step.ready_at or 0.0)  # replicas tell theirs a little later
    times = times_of(steps, repeat.start)
    for name, color in (("prefill", "tab:orange"), ("decode", "tab:blue")):
        tokens = [getattr(step, f"num_{name}_tokens") for step in steps]
        rates.stairs(*binned_rate(times, tokens), color=color, label=name)
    for replica in sorted({step.replica for step in steps}):
        own = [step for step in steps if step.replica == replica]
        rows.stairs([step.num_running for step in own], times_of(own, repeat.start), label=f"replica {replica}")
        blocks.stairs([100 * step.blocks_used for step in own], times_of(own, repeat.start))
    if any(step.replica for step in steps):
        rows.legend()
    rates.set(title=title, ylabel="tokens per second", yscale="log")
    rates.legend()
    rows.set(ylabel="running rows")
    blocks.set(ylabel="KV-cache blocks in use, %", xlabel="seconds", xlim=(0, times[-1]))
    figure.savefig(file)


def times_of(steps: list[StepResult], start: float) -> list[float]:
    """When the first step began, 0.0, and when each was done, in seconds after `start`."""
    return [0.0, *(step.ready_at - start for step in steps if step.ready_at is not None)]


def binned_rate(times: list[float], tokens: list[int], bins: int = 100) -> tuple[np.ndarray, np.ndarray]:
    """Tokens per second in equal bins, and the bins' edges; step i runs evenly from times[i] to times[i + 1]."""
    edges = np.linspace(0, times[-1], bins + 1)
    done = np.interp(edges, times, np.cumsum([0, *tokens]))
    return np.diff(done) / np.diff(edges), edges
