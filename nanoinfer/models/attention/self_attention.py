"""SelfAttention: projections to queries, keys and values and back, around a decoder's attention or an encoder's."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from nanoinfer.attention.context import Context
from nanoinfer.kernels.attention.output_gate import gate_heads
from nanoinfer.layers.attention import Attention
from nanoinfer.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanoinfer.layers.norm import Joint
from nanoinfer.layers.text_attention import TextAttention
from nanoinfer.models.attention.parts import head_norms_of, projections, unused_shards
from nanoinfer.models.description import Description
from nanoinfer.parallel.shares import share_of
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.weights.shards import Shard


class SelfAttention(nn.Module):
    """Grouped-query attention: projects the joint's output to queries, keys and values, attends, and projects back."""

    def __init__(
        self, model: Description, layer: int, attention: Attention | TextAttention, tp: TensorParallel
    ) -> None:
        super().__init__()
        prefix, heads = model.names.prefix(layer), model.kv_heads[layer]
        self.head_dim, self.value_dim = heads.dim, heads.value_dim
        self.unused = [] if heads.source is None else unused_shards(model, heads, prefix)
        self.limit = model.qkv_limit
        self.head_norms = head_norms_of(model, heads, prefix, tp)
        self.gates = len(share_of(model.num_heads, tp.rank, tp.size)) if model.output_gate else 0
        self.qkv_proj = ColumnParallelLinear(
            projections(model, heads, prefix), model.hidden_size, tp, model.qkv_bias, model.formats
        )
        self.value_numbers = 0  # of a token, on this rank, where they are not as many as the keys'
        if heads.value_dim is not None:
            self.value_numbers = len(share_of(heads.count * heads.value_dim, tp.rank, tp.size, heads.value_dim))
        self.attention = attention
        self.o_proj = RowParallelLinear(
            prefix + model.names.o,
            model.num_heads * heads.value_size,
            model.hidden_size,
            tp,
            model.o_bias,
            model.formats,
        )

    def forward(self, x: Tensor, residual: Tensor | None, joint: Joint, context: Context) -> tuple[Tensor, Tensor]:
        """Return the branch's result, and the residual stream; the next joint adds the two."""
        projected, residual = self.qkv_proj(x, residual, joint, adapters=context.adapters)
        if self.limit is not None:
            projected.clamp_(-self.limit, self.limit)
        values: tuple[Tensor, ...] = ()
        if self.value_dim is not None:
            projected, own = projected.tensor_split([-self.value_numbers], dim=-1)
            values = (own.unflatten(-1, (-1, self.value_dim)),)
        qkv = projected.unflatten(-1, (-1, self.head_dim))
        if self.head_norms is not None:
            qkv = self.head_norms(qkv)
        if self.gates:
            qkv, gates = qkv.tensor_split([-self.gates], dim=1)
            heads = gate_heads(self.attention(qkv, context), gates)
        else:
            heads = self.attention(qkv, context, *values).flatten(1)
        return self.o_proj(heads, adapters=context.adapters), residual

    def shards(self) -> Iterator[Shard]:
        """Yield the shards that a checkpoint may have, although the layer uses another's keys and values."""
        yield from self.unused
