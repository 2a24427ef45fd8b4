"""TensorParallel: one rank's view of the group that shares a model."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT = timedelta(minutes=30)


class TensorParallel:
    """This process's rank among `size`, and the collectives between them. A group of one needs no process group.

    The group is an object of its own, not torch.distributed's default group, so that one process can hold several
    engines.
    """

    def __init__(self, rank: int = 0, size: int = 1, store: dist.Store | None = None, device: str = "cpu") -> None:
        self.rank = rank
        self.size = size
        self._group: Any = None  # torch's stubs leave out the collectives
        if size > 1:
            assert store is not None
            self._group = _nccl_group(store, rank, size) if device == "cuda" else _gloo_group(store, rank, size)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum x over the ranks, in place; returns x."""
        if self._group is not None:
            self._group.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """[n, ...] on each rank to [size, n, ...] on every rank, in rank order."""
        if self._group is None:
            return x.unsqueeze(0)
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        self._group._allgather_base(out, x.contiguous()).wait()
        return out.unflatten(0, (self.size, -1))

    def min(self, value: int, device: torch.device) -> int:
        """The smallest of the ranks' values."""
        return int(self.all_gather(torch.tensor([value], device=device)).min())

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.shutdown()
            self._group = None


def _gloo_group(store: dist.Store, rank: int, size: int) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = TIMEOUT
    return gloo(store, rank, size, options)


def _nccl_group(store: dist.Store, rank: int, size: int) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    return dist.ProcessGroupNCCL(store, rank, size, options)
