"""The picture of bench.py --plot."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from nanoinfer.benchmark.repeats import Repeat
from nanoinfer.engine.results.step_result import StepResult


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
    """Draw the repeat over its time into `file`.

    The picture has tokens per second, the tokens that were computed again so far, and for each replica the rows that
    run, the sequences that wait and the blocks that are held.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 9), layout="constrained")
    rates, rows, blocks, again = figure.subplots(4, sharex=True)
    steps = sorted(repeat.steps, key=lambda step: step.ready_at or 0.0)  # replicas tell theirs a little later
    times = times_of(steps, repeat.start)
    for name, color in (("prefill", "tab:orange"), ("decode", "tab:blue")):
        tokens = [getattr(step, f"num_{name}_tokens") for step in steps]
        rates.stairs(*binned_rate(times, tokens), color=color, label=name)
    replicas = sorted({step.replica for step in steps})
    for replica in replicas:
        own = [step for step in steps if step.replica == replica]
        own_times, of = times_of(own, repeat.start), f" on replica {replica}" if len(replicas) > 1 else ""
        color = f"C{replica % 10}"
        rows.stairs([step.num_running for step in own], own_times, color=color, label=f"running{of}")
        rows.stairs([step.num_waiting for step in own], own_times, color=color, linestyle=":", label=f"waiting{of}")
        blocks.stairs([100 * step.blocks_used for step in own], own_times, color=color)
    recomputed = np.cumsum([step.num_recomputed_tokens for step in steps])
    again.stairs(recomputed, times, baseline=None, color="tab:red")
    rates.set(title=title, ylabel="tokens per second", yscale="log")
    rates.legend()
    rows.set(ylabel="sequences", ylim=(0, None))
    rows.legend()
    blocks.set(ylabel="KV-cache blocks held, %", ylim=(0, 105))
    again.set(ylabel="tokens computed again", ylim=(0, max(1.05 * recomputed[-1], 1)))
    again.set(xlabel="seconds", xlim=(0, times[-1]))
    figure.savefig(file)


def times_of(steps: list[StepResult], start: float) -> list[float]:
    """When the first step began, 0.0, and when each was done, in seconds after `start`."""
    return [0.0, *(step.ready_at - start for step in steps if step.ready_at is not None)]


def binned_rate(times: list[float], tokens: list[int], bins: int = 100) -> tuple[np.ndarray, np.ndarray]:
    """Tokens per second in equal bins, and the bins' edges; step i runs evenly from times[i] to times[i + 1]."""
    edges = np.linspace(0, times[-1], bins + 1)
    done = np.interp(edges, times, np.cumsum([0, *tokens]))
    return np.diff(done) / np.diff(edges), edges
