"""How fast bytes come from the host, and how fast the device reads its own memory."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

MEASURED_BYTES = 256 << 20
TIMES = 3


def link_rate(device: torch.device) -> float:
    """Return the bytes a second that come from pinned host memory."""
    host = torch.empty(MEASURED_BYTES, dtype=torch.uint8, pin_memory=True)
    here = torch.empty(MEASURED_BYTES, dtype=torch.uint8, device=device)
    return MEASURED_BYTES / seconds_of(lambda: here.copy_(host, non_blocking=True), device)


def memory_rate(device: torch.device) -> float:
    """Return the bytes a second that a copy within the device reads and writes."""
    source, target = (torch.empty(MEASURED_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * MEASURED_BYTES / seconds_of(lambda: target.copy_(source), device)


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Return the least time of a few calls, behind one that sets up what there is to set up."""
    found = []
    for _ in range(TIMES + 1):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        work()
        torch.cuda.synchronize(device)
        found.append(time.perf_counter() - began)
    return min(found[1:])
