"""How kernels are launched: for how many multiprocessors, and how early.

Programmatic dependent launch (CUDA Programming Guide) starts a kernel while the one before it still runs.
It waits for that one before it touches what others write. What it may do before, such as reading weights or just being
launched, costs no time. Whoever launches with these options must call `wait_for_predecessor` in every program, before
any store and before any load of what another kernel writes: then, however early a kernel starts, all before its
predecessor are complete too. Weights may be loaded before: between their writing and a kernel that is launched early
there must be one that is not, as torch's all are.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

MULTIPROCESSORS_WHEN_INTERPRETED = 4


def early_launch(x: Tensor) -> dict[str, bool]:
    """The options that launch a kernel early on x's device, if it can: sm_90 and later."""
    return {"EARLY": True, "launch_pdl": True} if x.is_cuda and _can_launch_early(x.device) else {"EARLY": False}


@functools.cache
def _can_launch_early(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Of the device; interpreted kernels get a few, so that their programs share the work as they do there."""
    if device.type != "cuda":
        return MULTIPROCESSORS_WHEN_INTERPRETED
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def wait_for_predecessor(EARLY: tl.constexpr):
    """Let the next kernel start, and wait until the one before has ended and its stores are seen."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
