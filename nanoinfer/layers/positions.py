"""Learned positions, which are added to the tokens' embeddings (Gehring et al., 2017)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.weights.shards import Shard


@dataclass(frozen=True)
class PositionTable:
    """Where a checkpoint has a vector for each position.

    name: the tensor's, without ".weight"
    rows: it has so many
    first: the row of position 0
    """

    name: str
    rows: int
    first: int = 0


class PositionEmbedding(nn.Module):
    """A vector for each position. All ranks hold them, and one adds them to its part of the embeddings."""

    def __init__(self, table: PositionTable, hidden_size: int, tp: TensorParallel) -> None:
        super().__init__()
        self.table, self.tp = table, tp
        self.weight = nn.Parameter(torch.empty(table.rows, hidden_size), requires_grad=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return this rank's part, [tokens, hidden_size], of embeddings and positions.

        x: its part of the embeddings; positions: [tokens] int32, -1 for a padding token
        """
        if self.tp.rank > 0:
            return x
        return x + F.embedding(positions.clamp(min=0) + self.table.first, self.weight)

    def shards(self) -> Iterator[Shard]:
        """Yield the shard of the vectors."""
        yield Shard(f"{self.table.name}.weight", self.weight, tuple(self.weight.shape))
