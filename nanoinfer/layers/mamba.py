"""Mamba2 (Dao and Gu, 2024), as layers of Granite 4 and Falcon-H1 apply it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.attention.cache_layout import Matrices, State
from nanoinfer.attention.context import Context
from nanoinfer.kernels.delta.gated_norm import gated_norm, part_of_mean_squares
from nanoinfer.kernels.mamba.decode import mamba_rows
from nanoinfer.kernels.mamba.in_order import check_mamba, mamba_in_order
from nanoinfer.kernels.mamba.prefill import mamba_chunks
from nanoinfer.layers.convolution import CausalConvolution
from nanoinfer.layers.linear import ColumnParallelLinear, RowParallelLinear, stacked
from nanoinfer.layers.norm import Joint
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.weights.formats.formats import Formats
from nanoinfer.weights.shards import Fill, Shard

NormPlace: TypeAlias = Literal["behind", "before"]  # seen from the gate


@dataclass(frozen=True)
class Mamba2:
    """The sizes of a Mamba2 layer.

    heads, dim: of inputs, and numbers of each; numbers: that a state has for each input
    groups: divide heads, and are normalised each by itself; the heads of one let the same numbers in and out
    width: the convolution's; a token sees so many inputs, its own the last
    limits: of a token's step
    conv_bias, biases: the convolution has biases, and so have the first projection and the last one
    module: the mixer's, in the checkpoint; heads_field, groups_field: what the config calls their numbers
    norm: of what the heads put out: it comes behind the gate, or before it, or there is none
    factors: of what the first projection makes: gates, inputs, what lets them in, and out, and steps; None: all are 1
    """

    heads: int
    dim: int
    numbers: int
    groups: int
    width: int
    limits: tuple[float, float] = (0.0, float("inf"))
    conv_bias: bool = True
    biases: tuple[bool, bool] = (False, False)
    module: str = "mamba"
    groups_field: str = "mamba_n_groups"
    heads_field: str = "mamba_n_heads"
    norm: NormPlace | None = "behind"
    factors: tuple[float, float, float, float, float] | None = None

    @property
    def divided(self) -> dict[str, int]:
        """What ranks divide, as configs name it."""
        return {self.heads_field: self.heads}

    def groups_of(self, rank: int, ranks: int) -> range:
        """Return the groups of a rank's heads; several ranks may have heads of one."""
        first = rank * self.groups // ranks
        return range(first, first + max(self.groups // ranks, 1))

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
        groups = len(self.groups_of(0, ranks))
        matrices = Matrices(groups, self.heads // ranks, self.numbers, self.dim)
        return State(self.inner // ranks + 2 * groups * self.numbers, self.width, matrices)


class Mamba2Mixer(nn.Module):
    """The layer: each rank has a share of the heads, and what lets the same numbers in and out of them."""

    factors: Tensor | None

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
        self.prefix, self.layer, self.sizes, self.norm_eps, self.tp = prefix, layer, sizes, norm_eps, tp
        heads, self.groups = sizes.heads // tp.size, sizes.groups_of(tp.rank, tp.size)
        inputs, numbers = (sizes.heads, sizes.dim), (sizes.groups, sizes.numbers)
        together = stacked(f"{prefix}in_proj", inputs, inputs, numbers, numbers, (sizes.heads, 1))
        self._parts = [sizes.inner // tp.size, sizes.state(tp.size).channels, heads]
        self.in_proj = ColumnParallelLinear(together, hidden_size, tp, sizes.biases[0], formats)
        channels = stacked(f"{prefix}conv1d", inputs, numbers, numbers)
        self.convolution = CausalConvolution(layer, channels, sizes.width, tp, sizes.conv_bias)
        self.first_head, self.first_input = tp.rank * heads, tp.rank * self._parts[0]
        self.log_decay, self.dt_bias, self.skips = (
            nn.Parameter(torch.empty(heads, dtype=torch.float32), requires_grad=False) for _ in range(3)
        )
        self.norm = None if sizes.norm is None else nn.Parameter(torch.empty(self._parts[0]), requires_grad=False)
        self.register_buffer("factors", self._factors(), persistent=False)
        self.out_proj = RowParallelLinear(f"{prefix}out_proj", sizes.inner, hidden_size, tp, sizes.biases[1], formats)

    def _factors(self) -> Tensor | None:
        """Return the factor of each number that the first projection makes here, in float32."""
        if self.sizes.factors is None:
            return None
        inputs, _, heads = self._parts
        counts = torch.tensor([inputs, inputs, *[len(self.groups) * self.sizes.numbers] * 2, heads])
        return torch.tensor(self.sizes.factors, dtype=torch.float32).repeat_interleave(counts)

    def fix_order(self, sizes: list[int]) -> None:
        """Let a GPU compare the bits of prompts and of single tokens; raises ValueError as check_order does."""
        own, weight = self.sizes, self.convolution.weight
        check_mamba(len(self.groups), len(self.log_decay), own.numbers, own.dim, weight.dtype, weight.device)

    def forward(self, x: Tensor, residual: Tensor | None, joint: Joint, context: Context) -> tuple[Tensor, Tensor]:
        """Return the branch's result, and the residual stream; the next joint adds the two."""
        projected, residual = self.in_proj(x, residual, joint, adapters=context.adapters)
        if self.factors is not None:
            projected.mul_(self.factors)
        gate, xbc, dt = projected.split(self._parts, dim=-1)
        heads = self._recall(xbc, dt, context).flatten(1).unflatten(1, (len(self.groups), -1))
        gates_first = self.sizes.norm == "behind"
        squares = self._mean_squares(heads, gate if gates_first else None)
        normed = gated_norm(heads, gate, self.norm, self.norm_eps, gates_first, squares)
        return self.out_proj(normed, adapters=context.adapters), residual

    def _mean_squares(self, heads: Tensor, gate: Tensor | None) -> Tensor | None:
        """Return the mean squares of a group of which other ranks have heads, too, [tokens, 1]; None: they have none.

        heads, gate: as for part_of_mean_squares; the ranks call this together, and each adds to its own group's column
        """
        groups = self.sizes.groups
        if self.norm is None or groups >= self.tp.size:
            return None
        part, group = part_of_mean_squares(heads, gate, self.sizes.inner // groups), self.groups.start
        if groups == 1:
            return self.tp.all_reduce(part)
        return self.tp.all_reduce(F.pad(part, (group, groups - 1 - group)))[:, group : group + 1]

    def _recall(self, xbc: Tensor, dt: Tensor, context: Context) -> Tensor:
        """Let the states take in a step's tokens; returns what they answer, [tokens, heads, dim]."""
        states = context.states
        assert states is not None
        own, limits = states.layers[self.layer], self.sizes.limits
        parameters = self.log_decay, self.dt_bias, self.skips
        if states.spans is not None:
            assert own.rings is not None
            convolved = self.convolution(xbc, context, silu=True)
            return mamba_in_order(convolved, dt, *parameters, own.rings, states.spans, limits)
        if states.rows is not None:
            convolution = self.convolution.weight, self.convolution.bias
            return mamba_rows(xbc, dt, *convolution, *parameters, own, states.rows, limits)
        assert own.recurrence is not None
        assert states.chunks is not None
        convolved = self.convolution(xbc, context, silu=True)
        return mamba_chunks(convolved, dt, *parameters, own.recurrence, states.chunks, limits)

    def shards(self) -> Iterator[Shard]:
        """Yield the shards of the norm, and of what decides how heads forget. Random ones are as in a new model."""
        fills: dict[str, tuple[Tensor, Fill]] = {
            "A_log": (self.log_decay, "zeros"),
            "dt_bias": (self.dt_bias, "ones"),
            "D": (self.skips, "ones"),
        }
        for name, (values, fill) in fills.items():
            yield Shard(f"{self.prefix}{name}", values, (self.sizes.heads,), self.first_head, random=fill)
        if self.norm is not None:
            yield Shard(f"{self.prefix}norm.weight", self.norm, (self.sizes.inner,), self.first_input, random="ones")
