"""Layers that have Mamba2 and attention side by side, as Falcon-H1's (TII, 2025)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from nanoinfer.attention.cache_layout import State
from nanoinfer.attention.context import Context
from nanoinfer.layers.mamba import Mamba2, Mamba2Mixer
from nanoinfer.layers.norm import Joint, add_branches, scaled
from nanoinfer.parallel.tensor_parallel import TensorParallel


@dataclass(frozen=True)
class BesideAttention:
    """What a layer has beside attention, and how much of each.

    given, results: factors of what attention and Mamba2 read, and of their results
    """

    mamba: Mamba2
    given: tuple[float, float] = (1.0, 1.0)
    results: tuple[float, float] = (1.0, 1.0)

    @property
    def module(self) -> str:
        """Mamba2's module in the checkpoint."""
        return self.mamba.module

    @property
    def projected(self) -> int:
        """How many numbers of a token Mamba2's projections give and take."""
        return self.mamba.projected

    @property
    def divided(self) -> dict[str, int]:
        """What ranks divide, as configs name it."""
        return self.mamba.divided

    def state(self, ranks: int) -> State:
        """Return what a layer remembers beside its pages, on one of so many ranks."""
        return self.mamba.state(ranks)


class MambaBesideAttention(nn.Module):
    """Mamba2 and attention, which read the same tokens through one norm. Their results add up, times factors.

        residual --> the joint's norm --+--> attention --+--> the branch's result
                                        '--> Mamba2 -----'

    The ranks' parts of both results are added up at once, by the next joint.
    """

    def __init__(self, sizes: BesideAttention, attention: nn.Module, mamba: Mamba2Mixer, tp: TensorParallel) -> None:
        """attention: its forward is that of a mixer"""
        super().__init__()
        self.sizes, self.attention, self.mamba = sizes, attention, mamba
        self.passing = Joint(None, None, tp, sums=False)

    def forward(self, x: Tensor, residual: Tensor | None, joint: Joint, context: Context) -> tuple[Tensor, Tensor]:
        """Return the branch's result, and the residual stream; the next joint adds the two."""
        joined, residual = joint(x, residual)
        of_attention, of_mamba = self.sizes.given
        attended, _ = self.attention(scaled(joined, of_attention), None, self.passing, context)
        recalled, _ = self.mamba(scaled(joined, of_mamba), None, self.passing, context)
        return add_branches(attended, recalled, self.sizes.results), residual
