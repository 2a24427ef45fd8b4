"""The gated short convolution of LFM2 (Liquid AI, 2025): y = C * convolution(B * x), between two projections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from nanoinfer.attention.cache_layout import State
from nanoinfer.attention.context import Context
from nanoinfer.layers.convolution import CausalConvolution
from nanoinfer.layers.linear import ColumnParallelLinear, RowParallelLinear, stacked
from nanoinfer.layers.norm import Joint
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.weights.formats.formats import Formats


@dataclass(frozen=True)
class ShortConvolution:
    """The sizes of a gated short convolution.

    channels: of B, of C and of x; width: a token sees so many inputs, its own the last
    bias: the projections and the convolution have biases
    """

    module: ClassVar[str] = "conv"  # in all checkpoints

    channels: int
    width: int
    bias: bool = False

    @property
    def divided(self) -> dict[str, int]:
        """What ranks divide, as configs name it."""
        return {"hidden_size": self.channels}

    @property
    def projected(self) -> int:
        """How many numbers of a token the projections give and take."""
        return 4 * self.channels

    def state(self, ranks: int) -> State:
        """Return what a layer remembers, on one of so many ranks."""
        return State(self.channels // ranks, self.width)


class ShortConvolutionMixer(nn.Module):
    """The layer: each rank has a share of the channels of B, C and x."""

    def __init__(self, prefix: str, layer: int, sizes: ShortConvolution, tp: TensorParallel, formats: Formats) -> None:
        """prefix: the mixer's module in the checkpoint, with a dot; layer: its number; formats: as for linear layers"""
        super().__init__()
        channels, bias = sizes.channels, sizes.bias
        thirds = stacked(f"{prefix}in_proj", *[(channels, 1)] * 3)
        self.in_proj = ColumnParallelLinear(thirds, channels, tp, bias, formats)
        self.convolution = CausalConvolution(layer, stacked(f"{prefix}conv", (channels, 1)), sizes.width, tp, bias)
        self.out_proj = RowParallelLinear(f"{prefix}out_proj", channels, channels, tp, bias, formats)

    def forward(self, x: Tensor, residual: Tensor | None, joint: Joint, context: Context) -> tuple[Tensor, Tensor]:
        """Return the branch's result, and the residual stream; the next joint adds the two."""
        projected, residual = self.in_proj(x, residual, joint, adapters=context.adapters)
        before, after, inner = projected.chunk(3, dim=-1)
        recalled = after * self.convolution(before * inner, context)
        return self.out_proj(recalled, adapters=context.adapters), residual
