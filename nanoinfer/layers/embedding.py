"""Token embedding and output projection, split over the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.weights.shards import Shard


class VocabParallelEmbedding(nn.Module):
    """One vector a token; each rank holds those of a range of ids from `first_id`, the last rank's perhaps shorter.

    A model's output projection is one too, often the same one.
    """

    def __init__(
        self, name: str, vocab_size: int, hidden_size: int, tp: TensorParallel, other_name: str | None = None
    ) -> None:
        """name: of the tensor, without ".weight"; other_name: under which a checkpoint may store it once more"""
        super().__init__()
        self.name, self.other_name = name, other_name
        self.tp = tp
        self.vocab_size = vocab_size
        share = -(-vocab_size // tp.size)
        self.first_id = min(tp.rank * share, vocab_size)
        rows = min(self.first_id + share, vocab_size) - self.first_id
        self.weight = nn.Parameter(torch.empty(rows, hidden_size), requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """[tokens] int32 to this rank's part of their sum, [tokens, hidden_size]: zeros where the id is not its own."""
        if self.tp.size == 1:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self.first_id
        ours = (local >= 0) & (local < self.weight.shape[0])
        rows = F.embedding(local.where(ours, 0), self.weight)
        return rows * ours.unsqueeze(1)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """The same matrix as output projection: [rows, hidden_size] to [rows, this rank's token ids], into `out`."""
        return torch.mm(hidden, self.weight.t(), out=out)

    def shards(self) -> Iterator[Shard]:
        """This rank's rows."""
        shape = self.vocab_size, self.weight.shape[1]
        yield Shard(f"{self.name}.weight", self.weight, shape, self.first_id)
        if self.other_name is not None:
            yield Shard(f"{self.other_name}.weight", self.weight, shape, self.first_id)
