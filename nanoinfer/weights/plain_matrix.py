"""PlainMatrix: the format of most checkpoints, a matrix of numbers of the model's dtype.

A format is one class. It says which tensors of a checkpoint it stores, how a rank's part of them is cut, and how a
product uses them; the linear layers say only whose rows and columns it holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nanoinfer.kernels.linear.activation import Activation
from nanoinfer.kernels.linear.dispatch import linear, norm_linear
from nanoinfer.kernels.norm.rms_norm import Norm
from nanoinfer.weights.shards import Shard


@dataclass(frozen=True)
class Piece:
    """The rows of a matrix that are filled from one tensor of a checkpoint, or from a part of it.

    name: the tensor's, without ".weight"
    rows: how many, one piece's after another's
    shape: [out_features, in_features] of the whole tensor
    start: the piece begins here, among the tensor's rows, or if dim is 1, its columns
    """

    name: str
    rows: int
    shape: tuple[int, int]
    start: int
    dim: int = 0


class PlainMatrix(nn.Module):
    """[out_features, in_features], and if wanted a bias of [out_features]."""

    bias: Tensor | None

    def __init__(self, pieces: list[Piece], in_features: int, bias: bool) -> None:
        super().__init__()
        self.pieces = pieces
        rows = sum(piece.rows for piece in pieces)
        self.weight = nn.Parameter(torch.empty(rows, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(rows), requires_grad=False) if bias else None

    def product(
        self, x: Tensor, activation: Activation | None = None, may_split: bool = False, with_bias: bool = True
    ) -> Tensor:
        """See kernels.linear.dispatch.linear; the bias is added unless another rank does that."""
        return linear(x, self.weight, self.bias if with_bias else None, activation, may_split)

    def norm_product(
        self, x: Tensor, residual: Tensor | None, pre: Norm | None, post: Norm | None, activation: Activation | None
    ) -> tuple[Tensor, Tensor]:
        """See kernels.linear.dispatch.norm_linear."""
        return norm_linear(x, residual, pre, self.weight, self.bias, activation, post)

    def shards(self) -> Iterator[Shard]:
        """The tensors NAME.weight, and NAME.bias, of every piece."""
        first = 0
        for piece in self.pieces:
            rows = slice(first, first + piece.rows)
            first += piece.rows
            yield Shard(f"{piece.name}.weight", self.weight[rows], piece.shape, piece.start, piece.dim)
            if self.bias is not None:
                start = piece.start if piece.dim == 0 else 0
                yield Shard(f"{piece.name}.bias", self.bias[rows], piece.shape[:1], start, random="zeros")
