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
        order, ids = _order(logits), token_ids[:, None].long()
        ranks = (order > order.gather(1, ids)).sum(dim=1) + 1
        ids = torch.cat([ids, order.topk(max(counts), dim=1).indices], dim=1)
        return LogProbs(ids.int(), logits.log_softmax(dim=1).gather(1, ids), ranks.int(), counts, keys)

    def to_host(self) -> LogProbs:
        """Copy to host memory; from a CUDA device the copy is complete with the stream's next event."""
        token_ids, values, ranks = map(to_host, (self.token_ids, self.values, self.ranks))
        return LogProbs(token_ids, values, ranks, self.counts, self.keys)

    def entries(self) -> Iterator[tuple[int, Candidates]]:
        """Yield each token's key, and its Candidates."""
        columns = self.token_ids.tolist(), self.values.tolist(), self.ranks.tolist()
        for key, count, ids, values, rank in zip(self.keys, self.counts, *columns, strict=True):
            yield key, Candidates(ids[: count + 1], values[: count + 1], rank)


def _order(logits: Tensor) -> Tensor:
    """Return int64 numbers that are ordered as the logits are; of equal logits, the smaller token id's is larger.

    A float's bits, read as an integer, are in the floats' order; negative ones in reverse, until they are flipped.
    """
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0, which is its equal
    bits ^= (bits >> 31) & 0x7FFFFFFF
    order = bits.long()
    order <<= 32
    order -= torch.arange(logits.shape[1], device=logits.device)
    return order
