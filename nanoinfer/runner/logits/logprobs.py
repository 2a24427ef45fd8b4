"""LogProbs: the log-probabilities of tokens, and of the likeliest tokens in their places."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoinfer.runner.transfer import to_host


@dataclass
class LogProbs:
    """The log-probabilities of some tokens, each with those of the most likely tokens in its place.

    token_ids: [tokens, 1 + most] int32, the token itself first; values: [tokens, 1 + most] float32
    counts: for each token, how many of the most likely ones its entry has
    keys: for each token, the number of its row or chunk in the step
    """

    token_ids: Tensor
    values: Tensor
    counts: list[int]
    keys: list[int]

    @staticmethod
    def of(logits: Tensor, token_ids: Tensor, counts: list[int], keys: list[int]) -> LogProbs:
        """Compute LogProbs from logits: [tokens, vocabulary] float32, for token_ids: [tokens]."""
        values = logits.log_softmax(dim=1)
        top_values, top_ids = values.topk(max(counts), dim=1)
        ids = token_ids[:, None].long()
        return LogProbs(
            torch.cat([ids, top_ids], dim=1).int(),
            torch.cat([values.gather(1, ids), top_values], dim=1),
            counts,
            keys,
        )

    def to_host(self) -> LogProbs:
        """Copy to host memory; from a CUDA device the copy is complete with the stream's next event."""
        return LogProbs(to_host(self.token_ids), to_host(self.values), self.counts, self.keys)

    def entries(self) -> Iterator[tuple[int, dict[int, float]]]:
        """Yield each token's key, and its entry: token id -> log-probability."""
        told = zip(self.keys, self.counts, self.token_ids.tolist(), self.values.tolist(), strict=True)
        for key, count, ids, values in told:
            yield key, dict(zip(ids[: count + 1], values[: count + 1], strict=True))
