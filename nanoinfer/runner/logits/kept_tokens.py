"""KeptTokens: how many tokens could have been drawn, and how likely these were together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoinfer.kernels.sampling.distribution import at_temperature
from nanoinfer.runner.transfer import to_host


@dataclass
class KeptTokens:
    """For some drawn tokens, the tokens that could have been drawn in their places.

    counts: [tokens] int32; log_masses: [tokens] float32, the log of the probability that these tokens had together
        before the others were left out
    keys: for each token, the number of its row in the step
    """

    counts: Tensor
    log_masses: Tensor
    keys: list[int]

    @staticmethod
    def of(penalized: Tensor, kept: Tensor, temperatures: Tensor, rows: Tensor, keys: list[int]) -> KeptTokens:
        """Compute the KeptTokens of some rows.

        penalized: [n, vocabulary] float32, the logits before any token was left out
        kept: [n, vocabulary] float32, as kernels.sampling.distribution makes it
        temperatures: [n]; at temperature 0 the kept token has all the mass
        rows: [tokens], which of the n rows to return
        """
        counts = kept.isneginf().logical_not().sum(dim=1, dtype=torch.int32)
        shares = kept.logsumexp(dim=1) - at_temperature(penalized, temperatures).logsumexp(dim=1)
        return KeptTokens(counts[rows], shares.clamp(max=0).where(temperatures > 0, 0)[rows], keys)

    def to_host(self) -> KeptTokens:
        """Copy to host memory; from a CUDA device the copy is complete with the stream's next event."""
        return KeptTokens(to_host(self.counts), to_host(self.log_masses), self.keys)

    def entries(self) -> Iterator[tuple[int, tuple[int, float]]]:
        """Yield each token's key, and its count and log mass."""
        yield from zip(self.keys, zip(self.counts.tolist(), self.log_masses.tolist(), strict=True), strict=True)
