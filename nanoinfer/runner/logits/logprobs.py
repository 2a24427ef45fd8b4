"""LogProbs: the log-probabilities of tokens, and of the likeliest tokens in their places."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoinfer.logprob import Candidates
from nanoinfer.runner.transfer import to_host


@dataclass
class LogProbs:
    """The log-probabilities of some tokens, each with those of the most likely tokens in its place.

    token_ids: [tokens, 1 + most] int32, the token itself first; values: [tokens, 1 + most] float32
    ranks: [tokens] int32, of the token itself
    counts: for each token, how many of the most likely ones its entry has
    keys: for each token, the number of its row or chunk in the step
    """

    token_ids: Tensor
    values: Tensor
    ranks: Tensor
    counts: list[int]
    keys: list[int]

    @staticmethod
    def of(logits: Tensor, token_ids: Tensor, counts: list[int], keys: list[int]) -> LogProbs:
        """Compute LogProbs from logits: [tokens, vocabulary] float32, for token_ids: [tokens]."""
        values, ids = logits.log_softmax(dim=1), token_ids[:, None].long()
        own = values.gather(1, ids)
        ranks = (values > own).sum(dim=1, dtype=torch.int32) + 1
        top_values, top_ids = values.topk(max(counts), dim=1)
        ids = torch.cat([ids, top_ids], dim=1).int()
        return LogProbs(ids, torch.cat([own, top_values], dim=1), ranks, counts, keys)

    def to_host(self) -> LogProbs:
        """Copy to host memory; from a CUDA device the copy is complete with the stream's next event."""
        token_ids, values, ranks = map(to_host, (self.token_ids, self.values, self.ranks))
        return LogProbs(token_ids, values, ranks, self.counts, self.keys)

    def entries(self) -> Iterator[tuple[int, Candidates]]:
        """Yield each token's key, and its Candidates."""
        columns = self.token_ids.tolist(), self.values.tolist(), self.ranks.tolist()
        for key, count, ids, values, rank in zip(self.keys, self.counts, *columns, strict=True):
            yield key, Candidates(ids[: count + 1], values[: count + 1], rank)
