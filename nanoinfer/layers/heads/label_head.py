"""LabelHead: a classifier's scores of a text, in the place of a head that computes logits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.layers.embedding import Head
from nanoinfer.weights.shards import Shard

SCORE = "score"  # the tensor's name in all checkpoints


class LabelHead(Head):
    """A float32 matrix with a row for each label, whole on each rank: it is small. A model that only reads has no row.

    Scores have the labels' places as token ids have.
    """

    def __init__(self, hidden_size: int, labels: int) -> None:
        super().__init__()
        self.first_id, self.num_ids = 0, labels
        self.weight = nn.Parameter(torch.empty(labels, hidden_size, dtype=torch.float32), requires_grad=False)
        self._is_alone = False

    def fix_order(self, sizes: list[int]) -> None:
        """Let each row of hidden states have a product of its own, whose sums do not depend on the others."""
        self._is_alone = True

    def fix_parts(self) -> None:
        """Leave it: the CPU computes rows one by one, and ranks do not divide this matrix."""

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Score [rows, hidden_size]; returns [rows, labels] float32."""
        rows = hidden.float().split(1 if self._is_alone else len(hidden))
        return torch.cat([F.linear(row, self.weight) for row in rows], out=out)

    def shards(self) -> Iterator[Shard]:
        """Yield the matrix, if there are labels."""
        if self.num_ids:
            yield Shard(f"{SCORE}.weight", self.weight, tuple(self.weight.shape))
