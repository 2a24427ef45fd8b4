"""Sampling over a vocabulary that is split over the ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nanoinfer.kernels.ranks.best_of_ranks import best_of_ranks
from nanoinfer.kernels.sampling.draw import NO_TOKEN, draw
from nanoinfer.parallel.tensor_parallel import TensorParallel


class Sampler(nn.Module):
    """Each rank finds the best token of its own ids; one exchange decides between the ranks' candidates."""

    def __init__(self, first_id: int, tp: TensorParallel) -> None:
        super().__init__()
        self.first_id = first_id
        self.tp = tp

    def forward(self, logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """Draw one token for each row.

        logits: [rows, this rank's token ids]; temperatures, seeds, positions: [rows], as in kernels.sampling.draw
        Returns [rows] int32, equal on every rank: NO_TOKEN where a logit is NaN, or the best one infinite.
        """
        is_alone = self.tp.size == 1
        best, ids = draw(logits, temperatures, seeds, positions, self.first_id, marks=is_alone)
        if is_alone:
            return ids
        inbox = self.tp.inbox
        if inbox is not None and len(ids) <= inbox.max_rows:
            return best_of_ranks(best, ids, inbox.candidates_lane, inbox.rank, inbox.stop)
        # float64 holds both a token id and a float32 score exactly.
        candidates = self.tp.all_gather(torch.stack([best.double(), ids.double()], dim=-1))
        winner = candidates[..., :1].argmax(dim=0, keepdim=True)
        best, ids = candidates.take_along_dim(winner, dim=0)[0].unbind(dim=1)
        return ids.int().where(best.isfinite(), NO_TOKEN)
