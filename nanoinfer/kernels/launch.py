"""How kernels are launched: for how many multiprocessors, and how early.

Programmatic dependent launch (CUDA Programming Guide) starts a kernel while the one before it still runs.
It waits for that one before it touches what others write. What it may do before, such as reading weights or just being
launched, costs no time. Whoever launches with these options must call `wait_for_predecessor` in every program, before
any store and before any load of what another kernel writes: all kernels before the predecessor are complete then, too.
Weights may be loaded before: between their writing and a kernel that is launched early there must be one that is not,
as torch's all are.

A kernel lets its successor start only once it has itself stopped waiting. Else a whole row of kernels would stand
ready at once, and those behind would hold the shared memory that the next one needs.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

MULTIPROCESSORS_WHEN_INTERPRETED = 4


def early_launch(x: Tensor) -> dict[str, bool]:
    """The options that launch a kernel early on x's device, if it can."""
    return {"EARLY": True, "launch_pdl": True} if can_launch_early(x.device) else {"EARLY": False}


@functools.cache
def can_launch_early(device: torch.device) -> bool:
    """Whether a kernel can start while the one before it runs: from sm_90 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Of the device; interpreted kernels get a few, so that their programs share the work as they do there."""
    if device.type != "cuda":
        return MULTIPROCESSORS_WHEN_INTERPRETED
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def wait_for_predecessor(EARLY: tl.constexpr, START_SUCCESSOR: tl.constexpr = True):
    """Wait until the kernel before has ended and its stores are seen; then let the next one start."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        if START_SUCCESSOR:
            tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def start_successor(EARLY: tl.constexpr):
    """Let the next kernel start; for one that is long enough for its successor to be in the way until now."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
