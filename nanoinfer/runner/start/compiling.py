"""Compiles the kernels of steps before they are captured, or run for the first time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch

from nanoinfer.kernels.compiling import compile_kernels
from nanoinfer.kernels.launch import recording
from nanoinfer.process.bar import Advance
from nanoinfer.runner.message import PrefillMessage
from nanoinfer.runner.start.trials import Trials
from nanoinfer.runner.steps.kinds import DecodeKind
from nanoinfer.runner.steps.steps import Steps

RowsOfKind: TypeAlias = tuple[int, DecodeKind]  # what a decode step computes


def compile_steps(
    steps: Steps,
    trials: Trials,
    launched: list[RowsOfKind],
    captured: list[RowsOfKind],
    decode: Callable[[int, DecodeKind], None],
    advance: Advance,
) -> None:
    """Compile the kernels of prompts, and of decode steps that are to be launched and captured.

    decode: launches a step of so many rows and of a kind; advance: as for compile_kernels
    """

    def prefill(message: PrefillMessage) -> None:
        steps.update(message)
        steps.prefill(message)

    device = steps.logits.device
    tried: list[Callable[[], object]] = [partial(decode, *step) for step in launched]
    tried += [partial(recording()(decode), *step) for step in captured]
    tried += [partial(prefill, message) for message in (*trials.prefills(), *trials.largest_prefills())]
    with steps.model.one_of_each():
        compile_kernels(tried, device, advance)
    torch.cuda.synchronize(device)
    torch._C._cuda_clearCublasWorkspaces()
