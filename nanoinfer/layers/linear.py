"""Linear layers whose weights are split over the ranks (Megatron-LM, Shoeybi et al., 2019)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from nanoinfer.kernels.linear.dispatch import linear, norm_linear
from nanoinfer.layers.norm import RMSNorm
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.weights.loader import Shard


def share_of_heads(heads: int, ranks: int) -> int:
    """How many of the heads, or other units, a rank holds: an equal share, or one that others hold too."""
    assert heads % ranks == 0 or ranks % heads == 0
    return max(heads // ranks, 1)


class ColumnParallelLinear(nn.Module):
    """Several projections of one normed input as one matrix product; each rank holds a share of every one's outputs.

    outputs: the projections' names in the checkpoint and their sizes over all ranks, in units of head_dim
    head_dim: the unit that is not divided: a head, or a single feature; where there are fewer than ranks, several ranks
        hold the same one
    gated: there are two, and silu(the first) * the second is what is wanted
    """

    def __init__(
        self, in_features: int, outputs: dict[str, int], tp: TensorParallel, head_dim: int = 1, gated: bool = False
    ) -> None:
        super().__init__()
        self.tp = tp
        self.head_dim = head_dim
        self.gated = gated
        self.outputs = outputs
        self.sizes = [share_of_heads(heads, tp.size) * head_dim for heads in outputs.values()]
        self.weight = nn.Parameter(torch.empty(sum(self.sizes), in_features), requires_grad=False)

    def forward(self, x: Tensor, residual: Tensor | None, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """Project norm(x + residual), both [tokens, in_features]; with a residual, x is as RowParallelLinear leaves it.

        Returns [tokens, this rank's share of the first projection, of the second, ...], or if gated
        [tokens, its share of one], and x + residual.
        """
        if self.tp.size == 1:
            return norm_linear(x, residual, norm.weight, norm.eps, self.weight, self.gated)
        normed, total = norm(x, residual)
        return linear(normed, self.weight, self.gated), total

    def shards(self) -> Iterator[Shard]:
        """Each projection's rows of the merged weight."""
        targets = self.weight.split(self.sizes)
        for target, (name, heads) in zip(targets, self.outputs.items(), strict=True):
            start = self.tp.rank * heads // self.tp.size * self.head_dim
            yield Shard(target, (heads * self.head_dim, self.weight.shape[1]), start, sibling=name)


class RowParallelLinear(nn.Module):
    """A projection whose input is split over the ranks, each of which is left with its part of a sum.

    What norms the sum, together with the residual, adds it up.
    """

    def __init__(self, in_features: int, out_features: int, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.in_features = in_features
        share = in_features // tp.size
        assert share * tp.size == in_features
        self.weight = nn.Parameter(torch.empty(out_features, share), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, this rank's share of in_features] to its part of the sum, [tokens, out_features].

        Alone, a rank may leave that in pieces: [pieces, tokens, out_features] float32.
        """
        return linear(x, self.weight, may_split=self.tp.size == 1)

    def shards(self) -> Iterator[Shard]:
        """This rank's columns."""
        out_features, share = self.weight.shape
        yield Shard(self.weight, (out_features, self.in_features), self.tp.rank * share, dim=1)
