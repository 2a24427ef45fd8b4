"""The activation xIELU, whose numbers each layer learns (Huang and Schlag, 2024)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from nanoinfer.kernels.linear.activation import xielu
from nanoinfer.weights.shards import Shard

NAMES = ("alpha_p", "alpha_n", "beta", "eps")  # in a checkpoint; the last two are constants


class XIELU(nn.Module):
    """A layer's xIELU. Its numbers are in float32, whatever the model's dtype."""

    def __init__(self, name: str) -> None:
        """name: the module in the checkpoint"""
        super().__init__()
        self.name = name
        self.numbers = nn.Parameter(torch.empty(len(NAMES), dtype=torch.float32), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute it of [tokens, size]."""
        return xielu(x, self.numbers)

    def shards(self) -> Iterator[Shard]:
        """Yield the shards of the numbers."""
        for place, name in enumerate(NAMES):
            is_constant = place > 1
            target = self.numbers[place] if is_constant else self.numbers[place : place + 1]
            yield Shard(f"{self.name}.{name}", target, tuple(target.shape), random="ones", is_constant=is_constant)
