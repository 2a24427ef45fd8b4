"""LowRank: what an adapter adds to one matrix of a checkpoint; Adapter: all of these."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LowRank:
    """The matrix scale * b a, [outputs, inputs], that is added to a checkpoint's.

    a: [rank, inputs]; b: [outputs, rank]; both of any floats, on any device
    """

    a: Tensor
    b: Tensor
    scale: float

    @property
    def rank(self) -> int:
        """Its rank, at most."""
        return len(self.a)


@dataclass(frozen=True)
class Adapter:
    """An adapter that has been checked. updates: by the module that the checkpoint names"""

    name: str
    updates: dict[str, LowRank]
