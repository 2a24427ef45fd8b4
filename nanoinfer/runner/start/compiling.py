"""Compiles the kernels of steps before they are captured, or run for the first time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from nanoinfer.config import Config
from nanoinfer.kernels.launch import recording
from nanoinfer.runner.cuda_graphs import PLAIN, DecodeKind
from nanoinfer.runner.start.side_by_side import run_side_by_side
from nanoinfer.runner.start.trials import Trials
from nanoinfer.runner.steps.steps import Steps

COMPILED_ROWS = (1, 16, 32, 64, 128, 192, 256)  # from each to the next, products are cut into other tiles


def compile_steps(
    config: Config,
    steps: Steps,
    trials: Trials,
    sizes: dict[DecodeKind, list[int]],
    decode: Callable[[int, DecodeKind], None],
) -> None:
    """Compile the kernels of the steps that are to be captured, and of a long prompt, side by side.

    sizes: of the steps to be captured, the plain kind first; decode: launches a step of so many rows and of a kind
    """

    def try_decode(rows: int, kind: DecodeKind) -> None:
        """Run an empty decode step; for some formats also as for a graph, which has other kernels for products."""
        decode(rows, kind)
        if any(format.has_graph_kernels for format in config.description.formats.quantized):
            with recording():
                decode(rows, kind)

    prefill, *others = [partial(steps.prefill, step) for step in trials.small_prefills()]
    draw = partial(steps.draw, steps.logits[: config.max_num_seqs], steps.batch.positions)
    largest = sizes[PLAIN][-1], PLAIN
    captured = [(rows, kind) for kind in sizes for rows in sizes[kind] if rows in COMPILED_ROWS]
    small = [partial(try_decode, *step) for step in captured if step != largest]
    with steps.model.one_of_each():
        # The steps that run first have few kernels in common.
        run_side_by_side(
            [prefill, draw, partial(decode, *largest), *small[:1]],
            [*small[1:], *others],
            steps.logits.device,
        )
