"""LogProbs: the log-probabilities of tokens, and of the likeliest tokens in their places."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoinfer.kernels.sampling.token_logprobs import token_logprobs
from nanoinfer.runner.logits.lines import number_lines
from nanoinfer.runner.transfer import to_host, upload

FEW = 64  # so many of the most likely tokens cost little more than one


@dataclass
class LogProbs:
    """The log-probabilities of some tokens, each with those of the most likely tokens in its place.

    token_ids: [tokens, 1 + most] int32, the token itself first; values: [tokens, 1 + most] float32
    ranks: [tokens] int32, of the token itself
    counts: for each key, how many of the most likely ones its entries have
    keys: for each token, the number of its row or chunk in the step; of a verifying step, those of the rows whose lines
        these are, see number_lines
    """

    token_ids: Tensor
    values: Tensor
    ranks: Tensor
    counts: list[int]
    keys: list[int]

    @staticmethod
    def by_count(logits: Tensor, token_ids: Tensor, counts: list[int], keys: list[int]) -> list[LogProbs]:
        """Compute as `of` does, but so that tokens with few likely ones do not pay for those with many, or with all."""
        if max(counts) <= FEW or min(counts) == max(counts):
            return [LogProbs.of(logits, token_ids, counts, keys)]
        parts: dict[int, list[int]] = {}
        for place, count in enumerate(counts):
            parts.setdefault(max(count, FEW), []).append(place)
        logprobs = []
        for places in parts.values():
            at = upload(array("i", places), logits.device).long()
            own = [[column[place] for place in places] for column in (counts, keys)]
            logprobs.append(LogProbs.of(logits[at], token_ids[at], *own))
        return logprobs

    @staticmethod
    def of(logits: Tensor, token_ids: Tensor, counts: list[int], keys: list[int]) -> LogProbs:
        """Compute LogProbs from logits: [tokens, vocabulary] of any floating dtype, for token_ids: [tokens]."""
        own, ranks, normalizers = token_logprobs(logits, token_ids)
        values, ids = own[:, None], token_ids[:, None].int()
        if most := max(counts):
            top_logits, top_ids = logits.topk(most, dim=1)
            values = torch.cat([values, top_logits.float() - normalizers[:, None]], dim=1)
            ids = torch.cat([ids, top_ids.int()], dim=1)
        return LogProbs(ids, values, ranks, counts, keys)

    @staticmethod
    def joined(parts: list[LogProbs]) -> LogProbs:
        """Put parts of the lines of some rows together; all have the rows' keys."""
        if len(parts) == 1:
            return parts[0]
        token_ids, values = [part.token_ids for part in parts], [part.values for part in parts]
        ranks = torch.cat([part.ranks for part in parts])
        return LogProbs(torch.cat(token_ids), torch.cat(values), ranks, parts[0].counts, parts[0].keys)

    def to_host(self) -> LogProbs:
        """Copy to host memory; from a CUDA device the copy is complete with the stream's next event."""
        token_ids, values, ranks = map(to_host, (self.token_ids, self.values, self.ranks))
        return LogProbs(token_ids, values, ranks, self.counts, self.keys)

    def entries(self, proposed: list[int] | None = None) -> Iterator[tuple[int, list[int], list[float], int]]:
        """Yield each line's key, and the fields of its Candidates; proposed: as for number_lines."""
        ids, values, ranks = self.token_ids.tolist(), self.values.tolist(), self.ranks.tolist()
        for place, line in number_lines(self.keys, proposed):
            width = self.counts[place] + 1
            yield self.keys[place], ids[line][:width], values[line][:width], ranks[line]
