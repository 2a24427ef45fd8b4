"""The gated delta rule (Gated Delta Networks, Yang et al., 2024), as layers of Qwen3.5 and OLMo Hybrid apply it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from nanoinfer.attention.cache_layout import Matrices, State
from nanoinfer.attention.context import Context
from nanoinfer.kernels.adapters.pairs import AdapterRows
from nanoinfer.kernels.delta.decode import delta_rows
from nanoinfer.kernels.delta.gated_norm import gated_norm
from nanoinfer.kernels.delta.in_order import check_delta, delta_in_order
from nanoinfer.kernels.delta.prefill import delta_chunks
from nanoinfer.layers.convolution import CausalConvolution
from nanoinfer.layers.linear import ColumnParallelLinear, Projection, RowParallelLinear, stacked, unit_by_unit
from nanoinfer.layers.norm import Joint, NormLayer
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.weights.formats.formats import Formats
from nanoinfer.weights.shards import Fill, Shard


@dataclass(frozen=True)
class GatedDelta:
    """The sizes of a layer with the gated delta rule.

    key_heads, value_heads: the former divide the latter; neighbouring value heads share a key head
    key_dim, value_dim: numbers of a head
    width: the convolution's; a token sees so many inputs, its own the last
    layout: which tensors the checkpoint has: "stacked": one holds the projections of queries, keys and values; "heads":
        two hold all projections, key head by key head, as in Qwen3-Next; "apart": each projection has its own, and so
        have the convolutions of queries, of keys and of values, as in OLMo Hybrid
    largest: as for kernels.delta.decode.delta_rows
    norm_eps: the number that the norm of the results adds; None: the model's
    """

    module: ClassVar[str] = "linear_attn"  # in all checkpoints

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    layout: Literal["stacked", "heads", "apart"] = "stacked"
    largest: float = 1.0
    norm_eps: float | None = None

    @property
    def divided(self) -> dict[str, int]:
        """What ranks divide, as configs name it."""
        return {"linear_num_key_heads": self.key_heads}

    @property
    def values_together(self) -> int:
        """How many value heads share a key head."""
        return self.value_heads // self.key_heads

    @property
    def channels(self) -> int:
        """The convolution's: the numbers of all queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def projected(self) -> int:
        """How many numbers of a token the projections give and take."""
        return self.channels + 2 * self.value_heads * (self.value_dim + 1)

    def state(self, ranks: int) -> State:
        """Return what a layer remembers, on one of so many ranks."""
        heads = self.key_heads // ranks, self.value_heads // ranks
        return State(self.channels // ranks, self.width, Matrices(*heads, self.key_dim, self.value_dim, gates=2))


class GatedDeltaMixer(nn.Module):
    """The layer: each rank has a share of the key heads, and the value heads that use them.

    A convolution and SiLU go over queries, keys and values. The rule turns them into a result for each value head,
    which a norm with a gate of its own finishes.
    """

    def __init__(
        self,
        prefix: str,
        layer: int,
        sizes: GatedDelta,
        hidden_size: int,
        norm_eps: float,
        tp: TensorParallel,
        formats: Formats,
    ) -> None:
        """prefix: the mixer's module in the checkpoint, with a dot; layer: its number; formats: as for linear layers"""
        super().__init__()
        self.prefix, self.layer, self.sizes = prefix, layer, sizes
        heads, values = sizes.value_heads // tp.size, sizes.value_heads * sizes.value_dim
        self.first_head = tp.rank * heads
        self._wide, self._narrow = [sizes.channels // tp.size, values // tp.size], [heads, heads]
        wide, narrow = _projections(prefix, sizes)
        # Some formats leave out what decides strengths and decays: there it has a matrix of its own.
        is_alike = formats.of(wide[0].name) == formats.of(narrow[0].name)
        self.in_proj = ColumnParallelLinear(wide + narrow if is_alike else wide, hidden_size, tp, formats=formats)
        self.narrow_proj = None if is_alike else ColumnParallelLinear(narrow, hidden_size, tp, formats=formats)
        channels, instead = _channels(f"{prefix}conv1d", sizes), None
        if sizes.layout == "apart":  # in files; a trainer's module may have one tensor
            channels, instead = _apart(prefix, ("q_conv1d", "k_conv1d", "v_conv1d"), sizes), channels
        self.convolution = CausalConvolution(layer, channels, sizes.width, tp, instead=instead)
        self.log_decay, self.dt_bias = (
            nn.Parameter(torch.empty(heads, dtype=torch.float32), requires_grad=False) for _ in range(2)
        )
        norm, out = ("o_norm", "o_proj") if sizes.layout == "apart" else ("norm", "out_proj")
        self.norm = NormLayer(f"{prefix}{norm}", sizes.value_dim, sizes.norm_eps or norm_eps)
        self.out_proj = RowParallelLinear(f"{prefix}{out}", values, hidden_size, tp, formats=formats)

    def fix_order(self, sizes: list[int]) -> None:
        """Let a GPU compare the bits of prompts and of single tokens; raises ValueError as check_order does."""
        own, ranks = self.sizes, self.sizes.value_heads // len(self.log_decay)
        weight = self.convolution.weight
        shape = own.key_heads // ranks, len(self.log_decay), own.key_dim, own.value_dim
        check_delta(*shape, own.largest, weight.dtype, weight.device)

    def forward(self, x: Tensor, residual: Tensor | None, joint: Joint, context: Context) -> tuple[Tensor, Tensor]:
        """Return the branch's result, and the residual stream; the next joint adds the two."""
        (qkv, gate, b, a), residual = self._project(x, residual, joint, context.adapters)
        heads = self._recall(qkv, a, b, context)
        normed = gated_norm(heads, gate, self.norm.weight, self.norm.norm.eps)
        return self.out_proj(normed, adapters=context.adapters), residual

    def _project(
        self, x: Tensor, residual: Tensor | None, joint: Joint, adapters: AdapterRows | None
    ) -> tuple[Sequence[Tensor], Tensor]:
        """Return q | k | v, the norm's gate, b and a, each [tokens, this rank's share], and the residual stream."""
        if self.narrow_proj is None:
            projected, residual = self.in_proj(x, residual, joint, adapters=adapters)
            return projected.split(self._wide + self._narrow, dim=-1), residual
        joined, residual = joint(x, residual)
        wide = self.in_proj.project(joined, adapters=adapters).split(self._wide, dim=-1)
        narrow = self.narrow_proj.project(joined, adapters=adapters)
        return wide + narrow.split(self._narrow, dim=-1), residual

    def _recall(self, qkv: Tensor, a: Tensor, b: Tensor, context: Context) -> Tensor:
        """Let the states take in a step's tokens; returns what they answer, [tokens, value heads, value_dim]."""
        states = context.states
        assert states is not None
        own, gates, largest = states.layers[self.layer], (self.log_decay, self.dt_bias), self.sizes.largest
        if states.spans is not None:
            assert own.rings is not None
            convolved = self.convolution(qkv, context, silu=True)
            return delta_in_order(convolved, a, b, *gates, own.rings, states.spans, largest)
        if states.rows is not None:
            return delta_rows(qkv, a, b, self.convolution.weight, *gates, own, states.rows, largest)
        assert own.recurrence is not None
        assert states.chunks is not None
        convolved = self.convolution(qkv, context, silu=True)
        return delta_chunks(convolved, a, b, *gates, own.recurrence, states.chunks, largest)

    def shards(self) -> Iterator[Shard]:
        """Yield the shards of what decides how fast heads forget. Random weights forget as slowly as a new model's."""
        fills: dict[str, tuple[Tensor, Fill]] = {"A_log": (self.log_decay, "zeros"), "dt_bias": (self.dt_bias, "ones")}
        for name, (values, fill) in fills.items():
            yield Shard(f"{self.prefix}{name}", values, (self.sizes.value_heads,), self.first_head, random=fill)


def _projections(prefix: str, sizes: GatedDelta) -> tuple[list[Projection], list[Projection]]:
    """Return where a checkpoint has queries, keys, values and gates, and where strengths and decays."""
    heads, key, few = sizes.key_heads, sizes.key_dim, sizes.values_together
    value = few * sizes.value_dim
    if sizes.layout == "apart":
        wide = _apart(prefix, ("q_proj", "k_proj", "v_proj"), sizes) + stacked(f"{prefix}g_proj", (heads, value))
        return wide, stacked(f"{prefix}b_proj", (heads, few)) + stacked(f"{prefix}a_proj", (heads, few))
    if sizes.layout == "heads":
        wide = unit_by_unit(f"{prefix}in_proj_qkvz", heads, (key, key, value, value))
        return wide, unit_by_unit(f"{prefix}in_proj_ba", heads, (few, few))
    wide = _channels(f"{prefix}in_proj_qkv", sizes) + stacked(f"{prefix}in_proj_z", (heads, value))
    return wide, stacked(f"{prefix}in_proj_b", (heads, few)) + stacked(f"{prefix}in_proj_a", (heads, few))


def _apart(prefix: str, names: tuple[str, str, str], sizes: GatedDelta) -> list[Projection]:
    """Return where three tensors have the rows of all queries, keys and values."""
    q, k, v = (f"{prefix}{name}" for name in names)
    key = sizes.key_heads, sizes.key_dim
    return stacked(q, key) + stacked(k, key) + stacked(v, (sizes.key_heads, sizes.values_together * sizes.value_dim))


def _channels(name: str, sizes: GatedDelta) -> list[Projection]:
    """Return where a tensor has the rows of all queries, keys and values."""
    heads, key = sizes.key_heads, sizes.key_dim
    return stacked(name, (heads, key), (heads, key), (heads, sizes.values_together * sizes.value_dim))
