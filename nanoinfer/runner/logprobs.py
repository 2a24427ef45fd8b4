"""LogProbs: how likely tokens were, and what was likelier."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoinfer.runner.transfer import to_host


@dataclass
class LogProbs:
    """The log-probabilities of some tokens, each with the most likely ones of its place.

    token_ids: [tokens, 1 + most] int32, the token itself first; values: [tokens, 1 + most] float32
    counts: how many of the most likely ones each is to be told with
    keys: whose each is
    """

    token_ids: Tensor
    values: Tensor
    counts: list[int]
    keys: list[int]

    @staticmethod
    def of(logits: Tensor, token_ids: Tensor, counts: list[int], keys: list[int]) -> LogProbs:
        """logits: [tokens, vocabulary] float32; token_ids: [tokens]."""
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
        """The same in host memory, where it arrives with the stream's next event."""
        return LogProbs(to_host(self.token_ids), to_host(self.values), self.counts, self.keys)

    def entries(self) -> Iterator[tuple[int, dict[int, float]]]:
        """Each one's key, and its log-probabilities by token id."""
        told = zip(self.keys, self.counts, self.token_ids.tolist(), self.values.tolist(), strict=True)
        for key, count, ids, values in told:
            yield key, dict(zip(ids[: count + 1], values[: count + 1], strict=True))
