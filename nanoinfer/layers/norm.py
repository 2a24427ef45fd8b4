"""RMSNorm as a layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from nanoinfer.kernels.norm import add_rms_norm
from nanoinfer.utils.loader import Shard


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the norm of x + residual, and that sum; all [tokens, size], x perhaps in pieces (kernels.norm)."""
        return add_rms_norm(x, residual, self.weight, self.eps)

    def shards(self) -> Iterator[Shard]:
        """The weight, whole on every rank."""
        yield Shard(self.weight, tuple(self.weight.shape))
