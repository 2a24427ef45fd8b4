"""LowRank: what an adapter adds to one matrix of a checkpoint; an Adapter is all of these."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from torch import Tensor


class LowRank(NamedTuple):
    """The matrix scale * b a, [outputs, inputs], that is added to a checkpoint's.

    a: [rank, inputs]; b: [outputs, rank]; both of any floats, on any device
    """

    a: Tensor
    b: Tensor
    scale: float

    @property
    def rank(self) -> int:
        """The inner size of the product."""
        return self.a.shape[0]


Adapter: TypeAlias = dict[str, LowRank]  # by the module that the checkpoint names
