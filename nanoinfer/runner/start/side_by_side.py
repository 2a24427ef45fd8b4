"""Runs steps side by side, so that their kernels compile at the same time: compiling is most of a first start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch

Step = Callable[[], object]
PATIENCE = 60.0  # seconds until every thread has its cuBLAS handle


def run_side_by_side(first: Sequence[Step], then: Sequence[Step], device: torch.device) -> None:
    """Run the steps of `first`, each on its own thread, then those of `then` on the same threads. Results are lost.

    Each thread takes a cuBLAS handle, whose memory PyTorch keeps for later threads. All take theirs before a step
    begins, and the calling thread before them, so that every engine of a process needs the same number. Raises the
    error of a step that fails.
    """
    together = Barrier(len(first))
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.current_blas_handle()

    def prepare() -> None:
        if device.type == "cuda":
            try:
                with torch.cuda.device(device):
                    torch.cuda.synchronize(device)  # gives the thread a context, without which cuBLAS warns
                    torch.cuda.current_blas_handle()
            except BaseException:
                together.abort()
                raise
        together.wait(PATIENCE)

    @torch.inference_mode()
    def run(step: Step) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        step()

    with ThreadPoolExecutor(len(first), initializer=prepare) as pool:
        for steps in (first, then):
            list(pool.map(run, steps))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()
