"""kept_tokens: how many tokens could have been drawn, and how likely these were together."""

from __future__ import annotations

import torch
from torch import Tensor

from nanoinfer.kernels.sampling.distribution import at_temperature


def count_kept(penalized: Tensor, kept: Tensor, temperatures: Tensor) -> list[Tensor]:
    """Compute two numbers for each line: of the tokens that could have been drawn in its place.

    penalized: [lines, vocabulary] float32, the logits before any token was left out
    kept: [lines, vocabulary] float32, as kernels.sampling.distribution makes it
    temperatures: [lines]; at temperature 0 the kept token has all the mass
    Returns their counts, [lines] int32, and their log masses, [lines] float32: the log of the probability that they had
    together before the others were left out.
    """
    counts = kept.isneginf().logical_not().sum(dim=1, dtype=torch.int32)
    shares = kept.logsumexp(dim=1) - at_temperature(penalized, temperatures).logsumexp(dim=1)
    return [counts, shares.clamp(max=0).where(temperatures > 0, 0)]
