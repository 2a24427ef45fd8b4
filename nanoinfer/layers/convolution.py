"""Causal convolution of each channel by itself: its weights, split over the ranks by channels."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from nanoinfer.attention.context import Context
from nanoinfer.kernels.delta.convolution import convolve_chunks, convolve_rows
from nanoinfer.layers.linear import Projection
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.weights.shards import Shard, bias_shards


class CausalConvolution(nn.Module):
    """The weights of this rank's channels, [channels, width], and if wanted their biases, [channels]."""

    bias: Tensor | None

    def __init__(
        self,
        layer: int,
        channels: list[Projection],
        width: int,
        tp: TensorParallel,
        bias: bool = False,
        instead: list[Projection] | None = None,
    ) -> None:
        """Store the layer's number and sizes.

        channels: where the tensors have their rows; width: a token sees so many inputs, its own the last
        instead: where another tensor may have them, in the same order; None: there is none
        """
        super().__init__()
        self.layer = layer
        self._sections, self._instead = (
            [section for part in parts for section in part.sections(tp.rank, tp.size, width)]
            for parts in (channels, instead or [])
        )
        rows = sum(section.rows for section in self._sections)
        self.weight = nn.Parameter(torch.empty(rows, width), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(rows), requires_grad=False) if bias else None

    def forward(self, x: Tensor, context: Context, silu: bool = False) -> Tensor:
        """Convolve a step's tokens, [tokens, channels], and remember their inputs; silu: SiLU follows."""
        states = context.states
        assert states is not None
        inputs = states.layers[self.layer].inputs
        if states.rows is not None:
            return convolve_rows(x, self.weight, inputs, states.rows, silu, self.bias)
        assert states.chunks is not None
        return convolve_chunks(x, self.weight, inputs, states.chunks, silu, self.bias)

    def shards(self) -> Iterator[Shard]:
        """Yield the shards of the weights, which a checkpoint has as [channels, 1, width], and of the biases."""
        parts = self.weight.unsqueeze(1).split([section.rows for section in self._sections])
        for section, rows in zip(self._sections, parts, strict=True):
            channels, width = section.shape
            yield Shard(f"{section.name}.weight", rows, (channels, 1, width), section.start)
        replaced = tuple(f"{section.name}.weight" for section in self._sections)
        for section, rows in zip(self._instead, parts, strict=False):
            channels, width = section.shape
            yield Shard(f"{section.name}.weight", rows, (channels, 1, width), section.start, replaces=replaced)
        if self.bias is not None:
            yield from bias_shards(self.bias, self._sections)
