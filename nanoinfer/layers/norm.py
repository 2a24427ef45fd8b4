"""RMSNorm as a layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from nanoinfer.kernels.norm.rms_norm import add_rms_norm, rms_norm
from nanoinfer.kernels.ranks.all_reduce_norm import all_reduce_add_rms_norm
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.weights.loader import Shard

ONE_OWNER_TOKENS = 48  # from here on, and among more than two ranks, traffic counts for more than latency


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension."""

    def __init__(self, size: int, eps: float, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the norm of x + residual, and that sum; all [tokens, size]. Without a residual, x alone.

        x: what RowParallelLinear or VocabParallelEmbedding leaves of it: this rank's part, or pieces (kernels.norm)
        """
        inbox = self.tp.inbox
        if inbox is not None and inbox.takes(x):
            lane = inbox.embedding_lane if residual is None else inbox.layer_lane()
            one_owner = self.tp.size > 2 and len(x) >= ONE_OWNER_TOKENS
            return all_reduce_add_rms_norm(x, residual, self.weight, self.eps, lane, inbox.rank, inbox.stop, one_owner)
        x = self.tp.all_reduce(x)
        if residual is None:
            return rms_norm(x, self.weight, self.eps), x
        return add_rms_norm(x, residual, self.weight, self.eps)

    def shards(self) -> Iterator[Shard]:
        """The weight, whole on every rank."""
        yield Shard(self.weight, tuple(self.weight.shape))
