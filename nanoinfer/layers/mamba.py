"""Mamba2 (Dao and Gu, 2024), as layers of Granite 4 and Bamba apply it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nanoinfer.attention.cache_layout import State
from nanoinfer.attention.context import Context
from nanoinfer.kernels.delta.gated_norm import gated_norm
from nanoinfer.kernels.mamba.decode import mamba_rows
from nanoinfer.kernels.mamba.prefill import mamba_chunks
from nanoinfer.layers.convolution import CausalConvolution
from nanoinfer.layers.linear import ColumnParallelLinear, RowParallelLinear, stacked
from nanoinfer.layers.norm import Joint
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.weights.formats.formats import Formats
from nanoinfer.weights.shards import Fill, Shard


@dataclass(frozen=True)
class Mamba2:
    """The sizes of a Mamba2 layer.

    heads, dim: of inputs, and numbers of each; numbers: that a state has for each input
    groups: divide heads, and are normalised each by itself; the heads of one let the same numbers in and out
    width: the convolution's; a token sees so many inputs, its own the last
    limits: of a token's step
    conv_bias, bias: the convolution, and the projections, have biases
    module: the mixer's, in the checkpoint; groups_field: what the config calls the groups
    """

    heads: int
    dim: int
    numbers: int
    groups: int
    width: int
    limits: tuple[float, float] = (0.0, float("inf"))
    conv_bias: bool = True
    bias: bool = False
    module: str = "mamba"
    groups_field: str = "mamba_n_groups"

    @property
    def divided(self) -> dict[str, int]:
        """What ranks divide, as configs name it."""
        return {self.groups_field: self.groups}

    @property
    def inner(self) -> int:
        """The numbers of all heads' inputs."""
        return self.heads * self.dim

    @property
    def channels(self) -> int:
        """The convolution's: the inputs, and what lets them in and out."""
        return self.inner + 2 * self.groups * self.numbers

    @property
    def projected(self) -> int:
        """How many numbers of a token the projections give and take."""
        return 2 * self.inner + self.channels + self.heads

    def state(self, ranks: int) -> State:
        """Return what a layer remembers, on one of so many ranks."""
        return State(self.channels // ranks, self.width, (self.heads // ranks, self.dim, self.numbers))


class Mamba2Mixer(nn.Module):
    """The layer: each rank has a share of the groups, and their heads."""

    def __init__(
        self,
        prefix: str,
        layer: int,
        sizes: Mamba2,
        hidden_size: int,
        norm_eps: float,
        tp: TensorParallel,
        formats: Formats,
    ) -> None:
        """prefix: the mixer's module in the checkpoint, with a dot; layer: its number; formats: as for linear layers"""
        super().__init__()
        self.prefix, self.layer, self.sizes, self.norm_eps = prefix, layer, sizes, norm_eps
        groups, heads = sizes.groups, sizes.heads // tp.size
        inputs, numbers = (groups, sizes.inner // groups), (groups, sizes.numbers)
        together = stacked(f"{prefix}in_proj", inputs, inputs, numbers, numbers, (groups, sizes.heads // groups))
        self._parts = [sizes.inner // tp.size, sizes.channels // tp.size, heads]
        self.in_proj = ColumnParallelLinear(together, hidden_size, tp, sizes.bias, formats)
        channels = stacked(f"{prefix}conv1d", inputs, numbers, numbers)
        self.convolution = CausalConvolution(layer, channels, sizes.width, tp, sizes.conv_bias)
        self.groups, self.first_head, self.first_input = groups // tp.size, tp.rank * heads, tp.rank * self._parts[0]
        self.log_decay, self.dt_bias, self.skips = (
            nn.Parameter(torch.empty(heads, dtype=torch.float32), requires_grad=False) for _ in range(3)
        )
        self.norm = nn.Parameter(torch.empty(self._parts[0]), requires_grad=False)
        self.out_proj = RowParallelLinear(f"{prefix}out_proj", sizes.inner, hidden_size, tp, sizes.bias, formats)

    def forward(self, x: Tensor, residual: Tensor | None, joint: Joint, context: Context) -> tuple[Tensor, Tensor]:
        """Return the branch's result, and the residual stream; the next joint adds the two."""
        projected, residual = self.in_proj(x, residual, joint, adapters=context.adapters)
        gate, xbc, dt = projected.split(self._parts, dim=-1)
        heads = self._recall(xbc, dt, context).flatten(1).unflatten(1, (self.groups, -1))
        normed = gated_norm(heads, gate, self.norm, self.norm_eps, gates_first=True)
        return self.out_proj(normed, adapters=context.adapters), residual

    def _recall(self, xbc: Tensor, dt: Tensor, context: Context) -> Tensor:
        """Let the states take in a step's tokens; returns what they answer, [tokens, heads, dim]."""
        states = context.states
        assert states is not None
        inputs, matrices = states.layers[self.layer]
        assert matrices is not None
        parameters, how = (self.log_decay, self.dt_bias, self.skips), (self.groups, self.sizes.limits)
        if states.chunks is not None:
            convolved = self.convolution(xbc, context, silu=True)
            return mamba_chunks(convolved, dt, *parameters, matrices, states.chunks, *how)
        own = self.convolution.weight, self.convolution.bias
        memory = inputs, matrices, states.slots, context.positions
        return mamba_rows(xbc, dt, *own, *parameters, *memory, *how)

    def shards(self) -> Iterator[Shard]:
        """Yield the shards of the norm, and of what decides how heads forget. Random ones are as in a new model."""
        fills: dict[str, tuple[Tensor, Fill]] = {
            "A_log": (self.log_decay, "zeros"),
            "dt_bias": (self.dt_bias, "ones"),
            "D": (self.skips, "ones"),
        }
        for name, (values, fill) in fills.items():
            yield Shard(f"{self.prefix}{name}", values, (self.sizes.heads,), self.first_head, random=fill)
        yield Shard(f"{self.prefix}norm.weight", self.norm, (self.sizes.inner,), self.first_input, random="ones")
