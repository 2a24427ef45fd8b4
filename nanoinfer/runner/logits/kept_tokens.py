"""KeptTokens: how many tokens could have been drawn, and how likely these were together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoinfer.kernels.sampling.distribution import at_temperature
from nanoinfer.runner.logits.lines import Which, number_lines
from nanoinfer.runner.transfer import to_host


@dataclass
class KeptTokens:
    """For some drawn tokens, the tokens that could have been drawn in their places.

    counts: [tokens] int32; log_masses: [tokens] float32, the log of the probability that these tokens had together
        before the others were left out
    keys: the numbers of rows in the step, in the order of their lines
    """

    counts: Tensor
    log_masses: Tensor
    keys: list[int]

    @staticmethod
    def of(penalized: Tensor, kept: Tensor, temperatures: Tensor, rows: Which, keys: list[int]) -> KeptTokens:
        """Compute the KeptTokens of some lines.

        penalized: [n, vocabulary] float32, the logits before any token was left out
        kept: [n, vocabulary] float32, as kernels.sampling.distribution makes it
        temperatures: [n]; at temperature 0 the kept token has all the mass
        rows: which of the n lines to return
        """
        counts = kept.isneginf().logical_not().sum(dim=1, dtype=torch.int32)
        shares = kept.logsumexp(dim=1) - at_temperature(penalized, temperatures).logsumexp(dim=1)
        return KeptTokens(counts[rows], shares.clamp(max=0).where(temperatures > 0, 0)[rows], keys)

    @staticmethod
    def joined(parts: list[KeptTokens]) -> KeptTokens:
        """Put parts of the lines of some rows together; all have the rows' keys."""
        if len(parts) == 1:
            return parts[0]
        counts, log_masses = [part.counts for part in parts], [part.log_masses for part in parts]
        return KeptTokens(torch.cat(counts), torch.cat(log_masses), parts[0].keys)

    def to_host(self) -> KeptTokens:
        """Copy to host memory; from a CUDA device the copy is complete with the stream's next event."""
        return KeptTokens(to_host(self.counts), to_host(self.log_masses), self.keys)

    def entries(self, proposed: list[int] | None = None) -> Iterator[tuple[int, tuple[int, float]]]:
        """Yield the key, count and log mass of each line; proposed: as for number_lines."""
        counts, log_masses = self.counts.tolist(), self.log_masses.tolist()
        for place, line in number_lines(self.keys, proposed):
            yield self.keys[place], (counts[line], log_masses[line])
