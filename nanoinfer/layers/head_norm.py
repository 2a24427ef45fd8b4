"""LayerNorms of queries and keys, each head by itself, before they are rotated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.weights.shards import Shard


@dataclass(frozen=True)
class HeadNorms:
    """The names that a checkpoint gives to such norms, without the layer's prefix, and what they have.

    q, k: of the queries and of the keys
    weights: "one": all heads share a vector; "rows": a matrix has a row for each head; "tensors": each head has a
        tensor of its own, whose name ends with its number
    has_bias: all heads share one
    """

    q: str
    k: str
    weights: str
    has_bias: bool = False


class HeadNorm(nn.Module):
    """The LayerNorm of the heads of queries, or of those of keys, that a rank has."""

    def __init__(self, norms: HeadNorms, name: str, heads: range, count: int, dim: int, eps: float) -> None:
        """name: the norm's; heads: the rank's, of `count`; dim: numbers in a head"""
        super().__init__()
        self.norms, self.name, self.heads, self.count, self.eps = norms, name, heads, count, eps
        # Each rank has all heads' tensors, as each must know all names of a checkpoint.
        rows = {"one": 1, "rows": len(heads), "tensors": count}[norms.weights]
        self.weight = nn.Parameter(torch.empty(rows, dim), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(dim), requires_grad=False) if norms.has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [tokens, heads, dim]."""
        own = slice(self.heads.start, self.heads.stop) if self.norms.weights == "tensors" else slice(None)
        normed = F.layer_norm(x.float(), x.shape[-1:], eps=self.eps) * self.weight[own].float()
        return (normed if self.bias is None else normed + self.bias.float()).to(x.dtype)

    def shards(self) -> Iterator[Shard]:
        """Yield the shards of the weights, and of the bias."""
        dim, kind = self.weight.shape[1], self.norms.weights
        if kind == "one":
            yield Shard(f"{self.name}.weight", self.weight[0], (dim,), random="ones")
        elif kind == "rows":
            yield Shard(f"{self.name}.weight", self.weight, (self.count, dim), self.heads.start, random="ones")
        else:
            for head, row in enumerate(self.weight):
                yield Shard(f"{self.name}.{head}.weight", row, (dim,), random="ones")
        if self.bias is not None:
            yield Shard(f"{self.name}.bias", self.bias, (dim,), random="zeros")


class QKNorms(nn.Module):
    """The norm of the queries' heads, and that of the keys'."""

    def __init__(self, q_norm: HeadNorm, k_norm: HeadNorm) -> None:
        super().__init__()
        self.q_norm, self.k_norm = q_norm, k_norm

    def forward(self, qkv: Tensor) -> Tensor:
        """Normalise the queries and keys of [tokens, heads of queries, of keys and of values, dim]."""
        queries, keys = len(self.q_norm.heads), len(self.k_norm.heads)
        q, k, v = qkv.tensor_split([queries, queries + keys], dim=1)
        return torch.cat([self.q_norm(q), self.k_norm(k), v], dim=1)
